"""Locust: simulated users who chat; every answer must come, with the times that the scenario measures."""

import json
import subprocess
from pathlib import Path

from checks import check

COMMAND = """\
# guide: bash
locust -f locustfile.py --host http://127.0.0.1:8000 --headless --users 3 --spawn-rate 3 --run-time 5s --json-file load
# end
"""
subprocess.run(COMMAND.replace("--headless", "--headless --only-summary --stop-timeout 60"), shell=True, check=True)
rows = {row["name"]: row for row in json.loads(Path("load.json").read_text(encoding="utf-8"))}
requests = rows["/v1/chat/completions"]["num_requests"]
check("answers, none failed", requests >= 3 and not any(row["num_failures"] for row in rows.values()))
check("every answer was read whole", rows["whole answer"]["num_requests"] == requests)
first, whole = (rows[name]["total_response_time"] for name in ("time to first token", "whole answer"))
check("the first token comes before the rest", 0 < first < whole)
