"""`helm test`: asks the gateway at URL for its models and one of them a question, for SECONDS at most, showing KEY.

With https its certificate must be for SERVER_NAME, signed by the CA in the file CA or by one that the image trusts.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request


class Named(ssl.SSLContext):
    """Verifies; by the name in the certificate, which need not be the one in the URL."""

    def wrap_socket(self, *args, server_hostname=None, **options):
        name = os.environ.get("SERVER_NAME") or server_hostname
        return super().wrap_socket(*args, server_hostname=name, **options)


def verifying():
    context = Named(ssl.PROTOCOL_TLS_CLIENT)
    if ca := os.environ.get("CA"):
        context.load_verify_locations(ca)
    else:
        context.load_default_certs()
    return context


def ask(path, question=None):
    request = urllib.request.Request(os.environ["URL"] + path, question and json.dumps(question).encode())
    request.add_header("content-type", "application/json")
    if key := os.environ.get("KEY"):
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=60, context=verifying()) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        if error.code in (401, 403):
            sys.exit(f"{path}: {error.code} {said}\nIs apiKeys.clientKey set, and one of the keys?")
        if '"task_not_served"' in said:
            return {"note": "its model does not chat"}
        raise OSError(f"{error.code} {said}") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            sys.exit(
                f"the gateway's certificate cannot be verified: {error.reason.verify_message}\n"
                "No key was sent. Name its CA with tls.ca, and the name that it is for with tls.serverName."
            )
        raise


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
