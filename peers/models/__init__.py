"""Models by what people have: a folder, a GGUF file, or a name of the Hugging Face hub.

`find.find_model` turns any of them into a folder that engines and trainers read.

For other rooms, by the names in docs/rooms.md: `find`, `hub`, `push`
"""
