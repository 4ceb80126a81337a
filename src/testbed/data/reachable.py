"""Find out within seconds if a web address can be reached."""

from __future__ import annotations

import threading


def status_of(url: str, timeout_s: float = 5.0) -> int | None:
    """Return the HTTP status of a HEAD request to `url`; None when nothing answers within `timeout_s`.

    The request runs in a thread of its own: a name server that never answers blocks the look-up itself, where the
    request's timeout does not reach (30 s and more with the system's defaults).
    """
    import requests  # 0.1 s: only for those who ask

    statuses: list[int | None] = []

    def ask() -> None:
        try:
            statuses.append(requests.head(url, timeout=timeout_s, allow_redirects=True).status_code)
        except requests.RequestException:
            statuses.append(None)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return statuses[0] if statuses else None
