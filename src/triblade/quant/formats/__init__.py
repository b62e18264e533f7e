"""How other tools store quantized matrices: one module per format, reading and writing side by side."""
