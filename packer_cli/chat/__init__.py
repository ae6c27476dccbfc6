"""Supervised records: from messages or prompts to text, and what of it is trained on.

messages.py       conversations of every dialect as OpenAI-style messages
exchanges.py      fields of any shape -> a conversation, or texts
templates.py      which chat template
chat_template.py  messages -> text in a sandbox, and where every turn begins and ends in it
syntax.py         which variables a template reads, and what it looks for in words
probe.py          conversations of marks, one for each structure, and what a text leaves out of them
turns.py          the characters that the assistant wrote, end of turn included
parts.py          which of them are not trained on
renderer.py       messages -> Document(text, spans)
documents.py      record -> Document: all of it together
encoder.py        records -> tokens and trained flags; shortens conversations
processes.py      rendering in processes beside the run, with limits
"""
