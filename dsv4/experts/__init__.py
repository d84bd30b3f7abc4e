"""Routed experts that do not all lie where the backend computes: where they are read from, and which are kept.

layout.py     one expert's six arrays as one run of bytes, the same in a slot, a staging buffer and a packed file
sources.py    where an expert's bytes lie: in the checkpoint's shards, or in a packed copy (packed.py)
cache.py      which expert is in which slot, and which one goes when another must come
store.py      the loop: what a forward needs is staged in the background while what is there computes
placement.py  what the settings ask for of all this

Without a budget for experts nothing of this runs: the backend takes them where the checkpoint is mapped.
"""
