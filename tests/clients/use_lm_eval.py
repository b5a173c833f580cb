# pip: torch==2.13.0 lm-eval[api,hf] tokenizers transformers
"""lm-evaluation-harness: a task by its client of /v1/completions and by its own backend, transformers, with the same weights.

Each log-likelihood of a choice, and of a whole text, has to agree within 1e-3, and both have to call the same choices greedy.
"""

import json
import os
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

QUESTIONS = (
    ("What is the capital of France?", ("Paris", "Lyon", "Berlin", "Madrid")),
    ("Which animal barks?", ("The dog", "The cat", "The fish", "The sparrow")),
    ("What do plants need in order to grow?", ("Light and water", "Iron and oil", "Only darkness", "Loud music")),
    ("How many days has a week?", ("seven", "five", "eleven", "two")),
    ("What is frozen water called?", ("ice", "steam", "sand", "smoke")),
    ("Who wrote the play Hamlet?", ("William Shakespeare", "Isaac Newton", "Marie Curie", "Ludwig van Beethoven")),
    ("Which planet do we live on?", ("Earth", "Mars", "Jupiter", "Venus")),
    ("What is 2 + 2?", ("4", "5", "22", "0")),
    ("Which colour do blue and yellow paint give?", ("green", "red", "black", "white")),
    ("What does a thermometer measure?", ("temperature", "weight", "distance", "the time of day")),
    ("Où se trouve la tour Eiffel ?", ("à Paris", "à Rome", "à Genève", "à Bruxelles")),
    (
        "Which of these is a line of Python?",
        ("print('hello')", 'System.out.println("hello");', "<p>hello</p>", "SELECT 'hello';"),
    ),
)
LONG = " ".join(
    f"{number}. {question} {choices[0]}." for number, (question, choices) in enumerate(QUESTIONS, start=1)
)  # some 200 tokens
TASK = """
task: questions
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
LIMIT = 1e-3


def log_likelihoods(model):
    """The pairs (log-likelihood, greedy or not) of each choice of each question, and the task's results."""
    found = simple_evaluate(
        model=model, tasks=["questions"], task_manager=TaskManager(include_path="tasks"), bootstrap_iters=0, log_samples=True
    )
    samples = sorted(found["samples"]["questions"], key=lambda sample: sample["doc_id"])
    return [(float(value), str(greedy)) for sample in samples for ((value, greedy),) in sample["resps"]], found["results"][
        "questions"
    ]


def rolling(model, texts):
    """The log-likelihood of each whole text."""
    asked = [Instance("loglikelihood_rolling", {}, (text,), index) for index, text in enumerate(texts)]
    return [float(value) for value in model.loglikelihood_rolling(asked)]


Path("tasks").mkdir()
Path("tasks/questions.yaml").write_text(TASK)
Path("questions.jsonl").write_text(
    "".join(json.dumps({"question": question, "choices": choices, "answer": 0}) + "\n" for question, choices in QUESTIONS)
)
served = LocalCompletionsAPI(
    model="smollm2",
    base_url=f"{os.environ['OPENAI_BASE_URL']}/completions",
    tokenizer_backend="huggingface",
    tokenizer=os.environ["TOKENIZER"],
    max_length=2048,
    batch_size=4,
)
own = HFLM(pretrained=os.environ["MODEL_FOLDER"], device="cpu", dtype="float32", batch_size=1)

(ours, our_results), (theirs, their_results) = log_likelihoods(served), log_likelihoods(own)
assert len(ours) == len(theirs) == sum(len(choices) for _, choices in QUESTIONS), (len(ours), len(theirs))
choices = max(abs(one - other) for (one, _), (other, _) in zip(ours, theirs, strict=True))
assert choices < LIMIT, (choices, ours, theirs)
assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs], (ours, theirs)
assert our_results == their_results, (our_results, their_results)

texts = (LONG, QUESTIONS[0][0])
whole = max(abs(one - other) for one, other in zip(rolling(served, texts), rolling(own, texts), strict=True))
assert whole < LIMIT, whole

ask = Instance("generate_until", {}, ("The capital of France is", {"until": ["\n"], "max_gen_toks": 5, "temperature": 0}), 0)
(text,) = served.generate_until([ask])
assert "Paris" in text, text
assert [text] == own.generate_until([ask]), text
print(f"figure: largest difference of a log-likelihood: {choices:.1e} of {len(ours)} choices, {whole:.1e} of {len(texts)} texts")
