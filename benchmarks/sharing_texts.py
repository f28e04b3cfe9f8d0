"""What is said in the benchmarks of sharing: a conversation, and prompts for beam search."""

CHAT_MESSAGES = (
    "Hi! I want to learn to bake bread at home. Where should I start?",
    "Which flour is best for a simple white loaf?",
    "How much water do I need for 500 grams of it?",
    "And how much salt and yeast?",
    "How long should I knead the dough, and how do I know that it is ready?",
    "It is cold in my kitchen. Does that change how long the dough has to rise?",
    "What oven temperature do you recommend?",
    "My last loaf had a pale crust. What did I do wrong?",
    "Can I freeze half of the bread?",
    "Please sum up the whole recipe in a few steps.",
)

BEAM_PROMPTS = (
    "The capital of France is",
    "Water boils at 100 degrees Celsius because",
    "Once upon a time, in a village between two mountains,",
    "The most important thing to know about gardening is",
    "In the year 1969, the first people on the Moon",
    "My favourite recipe begins with two eggs and",
    "A good teacher always",
    "The difference between weather and climate is that",
    "To train a neural network, you first need",
    "Dear Sir or Madam, I am writing to",
    "The old lighthouse keeper opened the door and",
    "Bees are important for farmers because they",
    "If you want to sleep better at night, try to",
    "The history of the bicycle starts in",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "Many people believe that money can buy happiness, but",
    "An operating system divides memory into pages of one size, keeps a table of which page lies where, and",
    "Q: Who wrote Romeo and Juliet?\nA: William Shakespeare\n\nQ: Who painted the Mona Lisa?\nA:",
    "Photosynthesis is the process by which plants",
)
