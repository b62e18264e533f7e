"""Choosing how to serve a model: hardware profiles, decision tables, a cost model, and plans made of them."""
