"""Drafts that arrive late: from a thread beside the model's steps, or behind tokens not yet known.

`background` proposes while the model runs, `continuations` are what it proposes, and `alignment`
finds on a device what of a late tree still follows the text.
"""
