"""Templates that llama-server knows by name, for the suite's --chat-template, which kvasir takes as a file."""
NAMED = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
              "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama3": "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
              "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "command-r": "{% for m in messages %}<|START_OF_TURN_TOKEN|><|{{ 'CHATBOT' if m.role == 'assistant' else m.role | upper }}"
                 "_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>{% endfor %}{% if add_generation_prompt %}"
                 "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
}
