"""The page with an engine at the other end of a network, which breaks."""

from __future__ import annotations

from fake_engine import FakeLoader
from lent import TOKEN, Wire, lent

from engine.serve.client import remote_loader
from engine.serve.remote import Remote
from engine.serve.session import Session
from specviz.ui import build, launch_kwargs


def test_the_page_is_the_same_and_says_when_the_engine_is_out_of_reach(browser):
    there = Session(FakeLoader(round_s=0.01))
    with lent(there) as port:
        wire = Wire(port)
        here = Session(remote_loader(Remote(f"ws://127.0.0.1:{wire.port}", TOKEN)))
        demo = build(here)
        demo.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch_kwargs(here))
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{demo.server_port}")
        page.wait_for_selector("#specviz-root .sv-badge")
        page.click("#sv-generate")
        page.wait_for_function("specviz.state.metrics.acceptance.rounds > 5")
        wire.down = True
        wire.cut()
        notice = "document.querySelector('.sv-notice').textContent"
        page.wait_for_function(f"{notice}.includes('The connection to the engine broke')")
        wire.down = False
        page.wait_for_function(f"!{notice}.includes('broke')")
        page.wait_for_function("specviz.state.metrics.run.status === 'finished'")
        # Nothing is missing: the fake engine emits one token a round.
        rounds, asked, lost = page.evaluate(
            "[specviz.state.metrics.acceptance.rounds, specviz.state.scene.sequences[0].length - 1,"
            " specviz.state.metrics.lost]"
        )
        assert rounds == asked >= 100 and lost == 0
        page.close()
        demo.close()
        here.close()
        wire.close()
        there.close()
