"""Beyond one process: a Plan on other engines and machines, and many replicas behind one address."""
