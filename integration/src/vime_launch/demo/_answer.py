"""Loads a model folder with transformers and answers questions greedily; run by the trainer's interpreter, which has torch.

``python _answer.py MODEL QUESTIONS.jsonl COUNT`` prints a JSON object with ``asked``, ``right`` and a few ``examples``.
"""

import json
import sys
from pathlib import Path


def main(model_folder, questions, count):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in Path(questions).read_text().splitlines()]
    rows = rows[:: max(1, len(rows) // count)][:count]
    ids = torch.tensor([tokenizer.encode(row["prompt"], add_special_tokens=False) for row in rows])
    with torch.no_grad():
        answers = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=2, pad_token_id=0)
    texts = tokenizer.batch_decode(answers[:, ids.shape[1] :], skip_special_tokens=True)
    examples = [f"{row['prompt'].removeprefix('<bos>')}{text}" for row, text in zip(rows[:5], texts, strict=False)]
    right = sum(text == row["answer"] for row, text in zip(rows, texts, strict=True))
    print(json.dumps({"asked": len(rows), "right": right, "examples": examples}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
