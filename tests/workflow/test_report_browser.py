"""The tiny audit's report in a real browser, at the width of a desk and of a phone."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

WIDTHS = {"desktop": 1280, "phone": 390}
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def browser_paths() -> tuple[str, str]:
    found = shutil.which("chromium"), shutil.which("chromedriver")
    if found[0] is None or found[1] is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
    return found[0], found[1]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    chromium, chromedriver = browser_paths()
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options, webdriver.ChromeService(chromedriver))
    yield found
    found.quit()


@pytest.fixture(params=WIDTHS)
def page(request: pytest.FixtureRequest, driver: webdriver.Chrome, results: Path) -> webdriver.Chrome:
    """The report, opened at one width, with all figures drawn."""
    width = WIDTHS[request.param]
    driver.get_log("browser")
    driver.get_log("performance")
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": request.param == "phone"}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.get((results / "report.html").resolve().as_uri())
    drawn = "return [...document.querySelectorAll('.plot')].every(plot => plot.querySelector('.main-svg'))"
    WebDriverWait(driver, 30).until(lambda it: it.execute_script(drawn))
    return driver


def disclosed(results: Path) -> dict[str, Any]:
    return dict(json.loads((results / "disclosure.json").read_text()))


def test_the_console_has_nothing_to_say(page: webdriver.Chrome) -> None:
    assert page.get_log("browser") == []


def test_nothing_but_the_file_is_asked_for(page: webdriver.Chrome) -> None:
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = {one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"}
    assert asked
    assert {url for url in asked if not url.startswith("data:")} == {page.current_url}


def test_every_figure_is_drawn(page: webdriver.Chrome) -> None:
    plots = page.find_elements(By.CSS_SELECTOR, ".plot")
    assert len(plots) == 5
    for plot in plots:
        svg = plot.find_element(By.CSS_SELECTOR, ".main-svg")
        assert svg.is_displayed()
        assert svg.size["width"] > 300
        assert svg.size["height"] > 150
        assert plot.find_elements(By.CSS_SELECTOR, ".scatterlayer .trace")


def test_the_page_does_not_scroll_sideways(page: webdriver.Chrome) -> None:
    widths = page.execute_script("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert widths[0] == widths[1]


def test_every_variant_has_its_claim_line(page: webdriver.Chrome, results: Path) -> None:
    rows = {
        row.find_element(By.TAG_NAME, "th").text: row.text
        for row in page.find_elements(By.CSS_SELECTOR, "#claims tbody tr")
    }
    claims = disclosed(results)["claims"]
    assert set(rows) == {claim["variant"] for claim in claims}
    for claim in claims:
        assert ("refused" in rows[claim["variant"]]) == (claim["outcome"] == "refused")


def test_an_arm_is_hidden_in_all_figures_at_once(page: webdriver.Chrome) -> None:
    box = page.find_element(By.CSS_SELECTOR, "#flips input[data-arm]:checked")
    arm = box.get_attribute("data-arm")
    count = (
        "return [...document.querySelectorAll('.plot')].flatMap(plot => plot.data)"
        ".filter(trace => trace.meta === arguments[0] && trace.visible === true).length"
    )
    assert page.execute_script(count, arm) == 6
    page.execute_script("arguments[0].click()", box)
    assert page.execute_script(count, arm) == 0
    assert not page.find_element(By.CSS_SELECTOR, f"#context input[data-arm='{arm}']").is_selected()
