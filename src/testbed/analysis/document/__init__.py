"""One model of what an analysis says, and three renderers of it: a terminal's text, GitHub Markdown, an HTML page.

comparison/, scaling/, report/ and profiles/ build documents (model.py) and decide what is said; terminal.py,
markdown.py and html.py decide how it looks. words.py writes numbers, units and lists, alike everywhere.
"""
