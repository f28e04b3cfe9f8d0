"""Makes docs/page.png: the server's page in headless Chromium, while a real model answers.

    python docs/make_screenshots.py [--folder docs] [--all]

Needs Debian's chromium and chromium-driver and the extras dev and serve. With --all also a phone's and a dark one's
view, to look at.
"""

import argparse
import sys
import time
from pathlib import Path

import pagedjax
from pagedjax.serving.app import Limits
from pagedjax.serving.backend import Backend
from pagedjax.serving.server import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from web_browser import browser

VIEWS = {
    "page": {"size": (1440, 1000), "dark": False},
    "page-dark": {"size": (1440, 1000), "dark": True},
    "page-phone": {"size": (390, 2400), "dark": False},
}


def main() -> None:
    """Takes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    llm = pagedjax.LLM(args.model, num_blocks=220, block_size=16, max_model_len=1024, max_num_seqs=16, warm_up="all")
    server = Server(Backend(llm, args.model), Limits(), port=0)
    server.start()
    try:
        for name, view in VIEWS.items() if args.all else [("page", VIEWS["page"])]:
            with browser(**view) as driver:
                driver.get(server.url)
                driver.find_element("id", "several").click()
                time.sleep(3.0)
                driver.find_element("id", "samples").click()
                time.sleep(6.0)
                driver.save_screenshot(str(args.folder / f"{name}.png"))
                driver.find_element("id", "stop-all").click()
    finally:
        server.stop()


if __name__ == "__main__":
    main()
