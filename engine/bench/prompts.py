"""What every contender continues."""

PROMPTS = (
    "Once upon a time, there was a little girl named Lily who",
    "Tom had a red kite.",
    "The little frog was",
    "One day, a boy named Ben went to the park with his mom.",
)
