"""Supervised records: from messages or prompts to text, and what of it is trained on.

messages.py       conversations of every dialect as OpenAI-style messages
templates.py      which chat template
chat_template.py  messages -> text, and where every turn begins and ends in it
sandbox.py        what templates run in
arguments.py      further variables that a template reads, for all records or for one
probe.py          conversations of marks, one for each structure
learned.py        what they tell: where turns begin and end, and what a template leaves out
turns.py          the characters that the assistant wrote, end of turn included
renderer.py       messages -> Document(text, spans)
documents.py      record -> Document: all of it together
shorten.py        conversations that are too long
encoder.py        records -> tokens and trained flags
pairs.py          records of preference: sides, and their tokens as pairs
processes.py      rendering in processes beside the run, with limits
"""
