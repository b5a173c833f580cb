# shows: many concurrent chats with the asynchronous client, some streamed
import asyncio

from openai import AsyncOpenAI


async def main():
    async with AsyncOpenAI(api_key="EMPTY", base_url="http://localhost:8000/v1") as client:
        model = (await client.models.list()).data[0].id

        async def one(number):
            messages = [{"role": "user", "content": f"Say {number}."}]
            stream = await client.chat.completions.create(model=model, messages=messages, max_tokens=5, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        print(await asyncio.gather(*map(one, range(8))))


asyncio.run(main())
