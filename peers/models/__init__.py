"""Models by what people have: a folder, a GGUF file, or a name of the Hugging Face hub.

`find.find_model` turns any of them into a folder that engines and trainers read.

For other rooms: `find`: FORMS, Model, find_model, hub_name, is_hub_name; `hub`: download_data;
`push`: Origin, PUSHED, card, push
"""
