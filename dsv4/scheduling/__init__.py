"""Sequences side by side: what the scheduler is made of."""
