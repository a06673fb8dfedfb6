"""LangChain's ChatOpenAI: invoke, stream, batch, usage, and a stop string."""

import json
import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

url, model = sys.argv[1:]
chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=16, max_retries=0, timeout=60)
messages = [SystemMessage("Be brief."), HumanMessage("Count to five.")]

whole = chat.invoke(messages)
usage = whole.usage_metadata
assert whole.response_metadata["finish_reason"] in ("stop", "length")
assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] and usage["output_tokens"] <= 16

chunks = list(chat.stream(messages, stream_usage=True))
total = chunks[0]
for chunk in chunks[1:]:
    total += chunk
assert total.text == whole.text, (total.text, whole.text)
assert total.usage_metadata["output_tokens"] == usage["output_tokens"]
assert len(chunks) > 2

assert [answer.text for answer in chat.batch([messages, messages])] == [whole.text] * 2
stopped = chat.bind(stop=[whole.text[3:5]]).invoke(messages)
assert stopped.text == whole.text[: whole.text.index(whole.text[3:5])]
assert stopped.response_metadata["finish_reason"] == "stop"
print(json.dumps({"text": whole.text, "usage": usage}))
