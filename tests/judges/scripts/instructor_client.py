"""instructor: an answer as a pydantic object, by a JSON schema and by a tool. Exits with 77 where the server says
that it does not do this."""

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field


class Animal(BaseModel):
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
        if "not supported by this server" in str(error):
            print(str(error).splitlines()[0][:300])
            sys.exit(77)
        raise
    assert isinstance(animal, Animal)
    found[name] = animal.model_dump()
print(json.dumps(found))
