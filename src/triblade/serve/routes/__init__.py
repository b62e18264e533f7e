"""The routes: each reads its body, asks the other modules, and answers."""
