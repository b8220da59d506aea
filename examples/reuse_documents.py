"""Documents whose keys and values are computed once and read at any place of later prompts.

What the same documents cost the second time is in the reports: the model does not compute them again. Documents do not
see each other then, so that a model that was not trained for it answers a little differently: `blend` recomputes some
of their tokens to make up for that.
"""

import tamis

DOCUMENTS = [
    "The supply boat comes on Monday at noon, and on Thursday when there is mail.",
    "In fog the keepers listen to radio channel 16. The horn sounds every two minutes.",
    "The crane lifts 900 kilograms. Its rope is changed every spring.",
]
QUESTIONS = ["Which radio channel do the keepers listen to?", "How much does the crane lift?"]

sampling = tamis.Sampling(max_new_tokens=24)
with tamis.LLM("smollm2", prefill="blend", accept_block_attention=True, cache_bytes=1 << 30) as llm:
    for order, question in enumerate(QUESTIONS):
        documents = DOCUMENTS[order:] + DOCUMENTS[:order]  # another place in the prompt: their keys still fit
        answer = llm.generate(question, documents=documents, sampling=sampling)
        print(f"{question}\n  {answer.text}\n  {answer.report}\n")
