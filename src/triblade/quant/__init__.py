"""Weights: how they are stored, made smaller, and how good they are afterwards."""
