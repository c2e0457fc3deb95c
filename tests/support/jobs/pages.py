"""A page in a browser, opened from a file or a URL, and the browser's errors and warnings."""

from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

_SHIFTS = """() => new Promise((resolve) => {
  let sum = 0;
  new PerformanceObserver((list) => list.getEntries().forEach((entry) => { sum += entry.value; }))
    .observe({ type: "layout-shift", buffered: true });
  setTimeout(() => resolve(sum), 200);
})"""

_FIRST_PAINT = """() => new Promise((resolve) => {
  new PerformanceObserver((list) => list.getEntriesByName("first-contentful-paint").forEach((entry) => {
    resolve(entry.startTime);
  })).observe({ type: "paint", buffered: true });
})"""

_DRAWN = """() => [...document.querySelectorAll(".chart")].map((place) => [
  place.id,
  [...place.querySelectorAll("svg .mark-line path, svg .mark-rect path, svg .mark-symbol path, svg .mark-text text")]
    .filter((mark) => mark.getBoundingClientRect().width > 0).length,
  place.scrollWidth <= place.clientWidth && place.scrollHeight <= place.clientHeight,
])"""


class OpenedPage:
    """A browser that shows one page at a time."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._page: Page | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def open(self, address: Path | str, *, width: int = 1200, dark: bool = False) -> Page:
        """Open a page and return it once its charts are drawn."""
        self.close()
        self._page = page = self._browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
        )
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(address.as_uri() if isinstance(address, Path) else address)
        page.wait_for_function("document.documentElement.dataset.drawn")
        return page

    def close(self) -> None:
        if self._page is not None:
            self._page.close()

    @staticmethod
    def marks(page: Page) -> dict[str, int]:
        """Return the number of marks in each chart. Fails if a chart is larger than its container."""
        drawn: list[list[Any]] = page.evaluate(_DRAWN)
        assert all(fits for *_, fits in drawn), drawn
        return {name: count for name, count, _ in drawn}

    @staticmethod
    def first_paint_milliseconds(page: Page) -> float:
        """Return the time from the request to the browser's First Contentful Paint."""
        milliseconds: float = page.evaluate(_FIRST_PAINT)
        return milliseconds

    @staticmethod
    def layout_shift(page: Page) -> float:
        """Return the browser's Cumulative Layout Shift since the page was loaded."""
        shift: float = page.evaluate(_SHIFTS)
        return shift
