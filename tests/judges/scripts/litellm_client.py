"""LiteLLM as a client: a whole answer, a stream with and without its usage, and its mapping of our errors."""

import json
import sys

import litellm

url, model = sys.argv[1:]
litellm.telemetry = False
MESSAGES = [{"role": "user", "content": "Count to five."}]
CALL = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "messages": MESSAGES, "num_retries": 0}
SHORT = {"max_tokens": 16, "temperature": 0}

whole = litellm.completion(**CALL, **SHORT)
text = whole.choices[0].message.content
assert whole.choices[0].finish_reason in ("stop", "length")
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

for options in ({}, {"stream_options": {"include_usage": True}}):
    chunks = list(litellm.completion(**CALL, **SHORT, stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    again = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert again.choices[0].message.content == text
    if options:
        assert again.usage.completion_tokens == whole.usage.completion_tokens

completion = litellm.text_completion(
    model=f"text-completion-openai/{model}", api_base=url, api_key="none", prompt="One, two,", max_tokens=4
)
assert isinstance(completion.choices[0].text, str)

for kind, change in (
    (litellm.BadRequestError, {"temperature": -1}),
    (litellm.NotFoundError, {"model": "openai/another"}),
):
    try:
        litellm.completion(**{**CALL, **SHORT, **change})
    except kind:
        continue
    raise AssertionError(f"{change} was not refused as {kind.__name__}")
print(json.dumps({"text": text, "usage": whole.usage.model_dump()}, default=str))
