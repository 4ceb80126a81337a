"""Audit tables of published figures: what does not follow from the rest, and what differs behind a ratio.

grid.py and drawn.py read the tables of a file, columns.py names their columns, told.py says which rows a text is about,
words.py what it says of them (english.py puts it into English), rules.py checks them.
"""
