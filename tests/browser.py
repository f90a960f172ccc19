"""A headless Chromium for the tests of the visualiser; they are skipped where there is none."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--force-color-profile=srgb",
)  # fmt: skip
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@contextlib.contextmanager
def chromium(width: int = 1100, height: int = 820) -> Iterator:
    """A selenium driver with a fresh profile."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install 'minisgl[dev]'")
    binary = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    driver_path = shutil.which("chromedriver")
    if binary is None or driver_path is None:
        pytest.skip("needs Chromium and chromedriver: apt install chromium chromium-driver")
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(prefix="minisgl-browser-") as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = binary
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(driver_path))
        try:
            driver.set_script_timeout(30)
            yield driver
        finally:
            driver.quit()


def emulate(driver, *, dark: bool = False, still: bool = False) -> None:
    """Set what the page's media queries see."""
    features = [
        {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
        {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
    ]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def errors(driver) -> list[str]:
    """What the console complains about."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
