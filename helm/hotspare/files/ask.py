"""`helm test`: asks the gateway at URL for its models and one of them a question, for SECONDS at most, showing KEY."""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request


def ask(path, question=None):
    request = urllib.request.Request(os.environ["URL"] + path, question and json.dumps(question).encode())
    request.add_header("content-type", "application/json")
    if key := os.environ.get("KEY"):
        request.add_header("authorization", f"Bearer {key}")
    # Within the cluster the certificate is often made for another name; whether it fits is the clients' question.
    anybody = ssl._create_unverified_context()
    try:
        with urllib.request.urlopen(request, timeout=60, context=anybody) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        if error.code in (401, 403):
            sys.exit(f"{path}: {error.code} {said}\nIs apiKeys.clientKey set, and one of the keys?")
        if '"task_not_served"' in said:
            return {"note": "its model does not chat"}
        raise OSError(f"{error.code} {said}") from None


def main():
    end = time.monotonic() + float(os.environ["SECONDS"])
    while True:
        try:
            models = [model["id"] for model in ask("/v1/models")["data"]]
            if not models:
                raise OSError("no worker serves a model yet")
            print("models:", ", ".join(models))
            words = [{"role": "user", "content": "What is the capital of France?"}]
            answer = ask("/v1/chat/completions", {"model": models[0], "max_tokens": 16, "messages": words})
        except OSError as error:
            print(error, flush=True)
            if time.monotonic() > end:
                sys.exit("no answer in time; look at the gateways' and the workers' logs")
            time.sleep(2)
        else:
            print("answer:", json.dumps(answer))
            return


main()
