"""What a newcomer writes: it asks twice and sends its own reward. With the argument `fails` it
exits with 1 for most rows."""

import json
import os
import sys
import urllib.request

BASE = os.environ["OPENAI_BASE_URL"]
KEY = os.environ["OPENAI_API_KEY"]
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def post(path, content):
    headers = {"Authorization": "Bearer " + KEY, "Content-Type": "application/json"}
    request = urllib.request.Request(BASE + path, json.dumps(content).encode(), headers)
    with OPENER.open(request) as answer:
        return json.load(answer)


row = json.load(sys.stdin)
messages = row["messages"]
for question in ("Are you sure?", ""):
    choice = post("/chat/completions", {"model": "policy", "messages": messages})["choices"][0]
    messages += [choice["message"], {"role": "user", "content": question}]
if sys.argv[1:] == ["fails"] and row["id"][1] % 4:
    sys.exit("the second answer is no answer")
print("finished by", choice["finish_reason"])
post(f"/episodes/{KEY}/reward", {"reward": float(row["ground_truth"] in str(messages))})
