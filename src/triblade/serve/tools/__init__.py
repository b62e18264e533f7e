"""Tool calls: how requests describe tools, how models write calls, and how an answer's text becomes calls."""
