"""The report people read: one HTML page, or Markdown."""
