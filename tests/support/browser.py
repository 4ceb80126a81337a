"""The report as a browser shows it."""

import shutil
from html.parser import HTMLParser
from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Page(HTMLParser):
    """What a browser would make of a page: its words, its addresses and its identifiers."""

    def __init__(self, path: Path):
        super().__init__()
        self.words, self.addresses, self.links, self.ids, self.tags, self.policy = [], [], [], [], [], ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes["href"]] if tag == "a" else []
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]
        loaded = ("src", "srcset", "data", "poster", "action", "background", *(["href"] if tag != "a" else []))
        self.addresses += [attributes[name] for name in loaded if attributes.get(name)]

    def handle_data(self, data):
        self.words.append(data)
