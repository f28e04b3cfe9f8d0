"""Headless Chromium for those who look at the page."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = (
    None
    if CHROMIUM and DRIVER
    else "needs a browser: on Debian, apt install chromium chromium-driver (see CONTRIBUTING.md)"
)


@contextmanager
def browser(size: tuple[int, int] = (1280, 900), dark: bool = False) -> Iterator[Any]:
    """A driver of a fresh browser window of this many pixels; its console can be read with get_log("browser")."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    if not (CHROMIUM and DRIVER):
        raise RuntimeError(MISSING)
    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--force-color-profile=srgb",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    try:
        # A window cannot be as narrow as a phone; the page's view can.
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        yield driver
    finally:
        driver.quit()
