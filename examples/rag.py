"""Answer a question from a folder of files, on this computer: python examples/rag.py examples/documents "…"?

The index is kept beside the working directory: the second run reads nothing anew.
"""

import sys

import tamis

folder, question = sys.argv[1], sys.argv[2]
sampling = tamis.Sampling(max_new_tokens=48)

with tamis.LLM("smollm2", prefill="sift") as llm, llm.corpus("rag.tamis") as kb:
    kb.add_files(folder)
    hits = kb.search(question, k=4)
    answer = llm.generate(question, documents=hits, sampling=sampling, on_text=lambda text: print(text, end=""))

print("\n")
for source in answer.sources:
    print(f"[{source.number}] {source.place} {source.title}")
print(answer.report)
