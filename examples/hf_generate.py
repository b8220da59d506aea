"""A sparse prefill in code of your own that calls a transformers model: python examples/hf_generate.py [MODEL]

MODEL is a directory or a hub name; without one, the small model that comes as a Python package is used.
"""

import sys

import tamis
from tamis.model.source import load_model

loaded = load_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2", device="cpu")
model, tokenizer = loaded.model, loaded.tokenizer  # as AutoModelForCausalLM and AutoTokenizer give them

texts = [f"Station {i}: the lamp burns {i + 3} drops of oil and is cleaned every {i + 2} days. " * 8 for i in range(12)]
question = "\n\nHow many drops of oil does the lamp of station 4 burn? It burns"
inputs = tokenizer("\n\n".join(texts) + question, return_tensors="pt")

with tamis.attach(model, prefill="sift", min_tokens=0, documents=texts, tokenizer=tokenizer) as attached:
    made = model.generate(inputs.input_ids, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.eos_token_id)

print(tokenizer.decode(made[0, inputs.input_ids.shape[1] :]))
print(attached.report)  # density, what stayed dense and why
