"""Supervised records: from messages or prompts to texts, and the parts of them to train on.

messages.py       records of any shape and dialect -> a conversation, or texts
templates.py      choice of the chat template
chat_template.py  messages -> text in a sandbox, and the characters of every turn
syntax.py         variables that a template reads, and names in it
probe.py          conversations of marks, one for each structure, and what a text leaves out of them
uses.py           how a template uses words
turns.py          characters that the assistant wrote, end of turn included
parts.py          those of them that are not trained on
renderer.py       messages -> Document(text, spans)
documents.py      records -> documents: all of the above together
encoder.py        documents -> tokens and trained flags; shortens conversations
captures.py       calls of agents -> the trace of their session
traces.py         traces of agents, by their token ids; trace_fields.py: their fields
processes.py      rendering in processes beside the run, with limits
"""
