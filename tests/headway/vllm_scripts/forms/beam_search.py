# shows: LLM.beam_search
from vllm import LLM
from vllm.sampling_params import BeamSearchParams

llm = LLM(model="facebook/opt-125m", enable_prefix_caching=True)
params = BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True)
outputs = llm.beam_search([{"prompt": "the quick"}, {"prompt": "jumps"}], params)
for output in outputs:
    assert len(output.sequences) == 4
    scores = [sequence.cum_logprob for sequence in output.sequences]
    assert scores == sorted(scores, reverse=True)
    print(output.sequences[0].text)
assert all(sequence.text.startswith("the quick") for sequence in outputs[0].sequences)
