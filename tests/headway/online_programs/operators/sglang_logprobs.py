# shows: SGLang's /generate with log-probabilities, as for the select function of its frontend
import requests

choices = ("Paris", "Rome")
means = []
for choice in choices:
    text = "The capital of France is " + choice
    body = {
        "text": text,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    meta = requests.post("http://localhost:30000/generate", json=body, timeout=60).json()["meta_info"]
    found = [each[0] for each in meta["input_token_logprobs"] if each[0] is not None]
    means.append(sum(found) / len(found))
print(choices[means.index(max(means))], means)
