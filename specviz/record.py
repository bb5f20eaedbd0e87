"""Records one real run, as the page replays it before the first live one.

python -m specviz.record assets/recordings/stories.ndjson.gz --link emulated:mixtral-a30
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from engine.config import EMBEDDED_MODEL, CacheBudget, EngineConfig, GenerationConfig, LinkConfig
from engine.errors import EngineError, UsageError
from engine.serve.runs import RunSettings
from engine.serve.session import Session
from specviz.trace import parse_events, save_events

LONGEST_S = 3600.0


def record(path: Path, settings: RunSettings) -> str:
    """Run `settings`, write its events to `path`, and return the text. Raises UsageError when the run failed."""
    session = Session(viewer_ttl=LONGEST_S)
    try:
        run = session.start(settings)
        session.wait_idle(LONGEST_S)
    finally:
        session.close()
    lines = run.hub.lines()
    end = json.loads(lines[-1])
    if end["kind"] != "run_end" or end["status"] != "finished":
        raise UsageError(f"nothing recorded: {end.get('error') or 'the run did not finish'}")
    parse_events(lines)
    save_events(path, [portable(line) for line in lines])
    return end["summary"][0]["text"]


def portable(line: str) -> str:
    """The event without the folders of this machine: a model's directory becomes its name."""
    event = json.loads(line)
    for part in (event, *event.get("summary", [])):
        config = part.get("config", {})
        if "model" in config and Path(config["model"]).is_dir():
            config["model"] = Path(config["model"]).name
    return json.dumps(event, separators=(",", ":"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the file to write, .ndjson or .ndjson.gz")
    parser.add_argument("--model", default=str(EMBEDDED_MODEL))
    parser.add_argument("--prompt", default="Tom had a red kite.")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--k", default="auto", help="0 to 16, or auto")
    parser.add_argument("--slots", type=int, default=4, help="cache slots a layer")
    parser.add_argument("--link", default="disk", help="disk, emulated:GBPS[:LATENCY_US] or emulated:PRESET")
    args = parser.parse_args(argv)
    k = args.k if args.k == "auto" else int(args.k) if args.k.isdecimal() else -1
    try:
        link = LinkConfig.parse(args.link)
        pace = {"link_gbps": link.gbps, "link_latency_us": link.latency_us} if link.gbps else {}
        settings = RunSettings(
            prompts=(args.prompt,),
            engine=EngineConfig(model=args.model, cache=CacheBudget(slots=args.slots), link=link),
            generation=GenerationConfig(max_new_tokens=args.max_new_tokens, k=k),
            knobs={"k": k, "slots": args.slots, **pace},
        )
        print(record(args.out, settings))
    except EngineError as error:
        print(f"specviz.record: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
