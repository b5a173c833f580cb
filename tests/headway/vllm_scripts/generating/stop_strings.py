# shows: stop strings
from vllm import LLM, SamplingParams

llm = LLM(model="facebook/opt-125m")
greedy = dict(temperature=0, max_tokens=30, ignore_eos=True)
(whole,) = llm.generate("the quick brown fox", SamplingParams(**greedy))
text = whole.outputs[0].text
stop = text[9:13]

(cut,) = llm.generate("the quick brown fox", SamplingParams(stop=["never there", stop], **greedy))
(kept,) = llm.generate("the quick brown fox", SamplingParams(stop=stop, include_stop_str_in_output=True, **greedy))
assert cut.outputs[0].text == text[: text.index(stop)]
assert kept.outputs[0].text == text[: text.index(stop)] + stop
for output in (cut, kept):
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)

token = whole.outputs[0].token_ids[4]
(ended,) = llm.generate("the quick brown fox", SamplingParams(stop_token_ids=[token], **greedy))
assert ended.outputs[0].token_ids[-1] == token
assert ended.outputs[0].text == llm.get_tokenizer().decode(ended.outputs[0].token_ids[:-1])
assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", token)
(longer,) = llm.generate("the quick brown fox", SamplingParams(stop=stop, stop_token_ids=[token], min_tokens=25, **greedy))
assert len(longer.outputs[0].token_ids) >= 25
print(repr(text), repr(cut.outputs[0].text), repr(kept.outputs[0].text), ended.outputs[0].text)
