"""Locust: simulated users who chat; every answer must come, with the times that the scenario measures."""

import csv
import subprocess
from pathlib import Path

from checks import check

COMMAND = """\
# guide: bash
locust -f locustfile.py --host http://127.0.0.1:8000 --headless --users 3 --spawn-rate 3 --run-time 5s --csv load
# end
"""
subprocess.run(COMMAND.replace("--headless", "--headless --only-summary --stop-timeout 60"), shell=True, check=True)
rows = {row["Name"]: row for row in csv.DictReader(Path("load_stats.csv").read_text(encoding="utf-8").splitlines())}
requests = rows["/v1/chat/completions"]
check("answers, none failed", int(requests["Request Count"]) >= 3 and rows["Aggregated"]["Failure Count"] == "0")
check("every answer was read whole", rows["whole answer"]["Request Count"] == requests["Request Count"])
first, whole = (float(rows[name]["Average Response Time"]) for name in ("time to first token", "whole answer"))
check("the first token comes before the rest", 0 < first < whole)
