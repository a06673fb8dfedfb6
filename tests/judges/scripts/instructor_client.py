"""instructor: an answer as a pydantic object, by a JSON schema and, where the model's template has tools, by a tool."""

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class Animal(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a small model would add properties without end

    kind: Literal["cat", "dog", "fox"]
    legs: int = Field(ge=0, le=9)
    quick: bool


url, model = sys.argv[1:]
plain = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
found = {}
for name, mode in (("json_schema", instructor.Mode.JSON_SCHEMA), ("tools", instructor.Mode.TOOLS)):
    client = instructor.from_openai(plain, mode=mode)
    try:
        animal = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Describe the quick brown fox."}],
            response_model=Animal,
            max_retries=1,
            max_tokens=200,
            temperature=0,
        )
    except Exception as error:
        if name == "tools" and "is of no known format of tool calls" in str(error):
            continue
        raise
    assert isinstance(animal, Animal)
    found[name] = animal.model_dump()
print(json.dumps(found))
