"""Anthropic's SDK as a client: a whole message, a stream, a count of tokens, and its mapping of our errors."""

import json
import sys

import anthropic

url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=60)
ASK = {
    "model": model,
    "max_tokens": 16,
    "system": "Be brief.",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Count to five."}]}],
    "extra_body": {"temperature": 0},
}

whole = client.messages.create(**ASK)
assert whole.type == "message" and whole.stop_reason in ("end_turn", "max_tokens")
text = "".join(block.text for block in whole.content)
assert whole.usage.output_tokens > 0

with client.messages.stream(**ASK) as stream:
    names = [event.type for event in stream]
    final = stream.get_final_message()
assert names[0] == "message_start" and names[-1] == "message_stop", names
assert "".join(block.text for block in final.content) == text
assert final.usage.output_tokens == whole.usage.output_tokens and final.stop_reason == whole.stop_reason

prompt = {name: ASK[name] for name in ("model", "system", "messages")}
counted = client.messages.count_tokens(**prompt).input_tokens
assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)

for kind, change in (
    (anthropic.BadRequestError, {"max_tokens": 0}),
    (anthropic.NotFoundError, {"model": "another"}),
):
    try:
        client.messages.create(**ASK | change)
    except kind as error:
        assert error.body["type"] == "error" and error.body["error"]["message"], error.body
        continue
    raise AssertionError(f"{change} was not refused as {kind.__name__}")
print(json.dumps({"text": text, "usage": whole.usage.model_dump()}))
