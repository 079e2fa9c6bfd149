"""A thousand texts to tokenize, the same in every Python: languages, code, emoji, white space, special tokens."""

import random

LANGUAGES = (
    "The quick brown fox doesn't jump over 13 lazy dogs; it's 7:45 a.m. and they've all gone.",
    "Größere Fußgängerübergänge kosten 1.234,56 € – natürlich ohne Gewähr.",
    "L'été dernier, j'ai mangé des crêpes à l'ombre d'un chêne; c'était délicieux !",
    "¿Dónde está la biblioteca? Mañana compraré 25 piñas en el mercado.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ο καλύτερος τρόπος να μάθεις είναι να διδάξεις άλλους.",
    "السلام عليكم، كيف حالك اليوم؟ لدينا ٣٤ كتابًا.",
    "שלום עולם, מה שלומך היום?",
    "नमस्ते दुनिया! आज १२ जनवरी है और मौसम ठंडा है।",
    "สวัสดีชาวโลก วันนี้อากาศดีมาก",
    "你好,世界!今天是二〇二四年三月十五日,天气很好。",
    "吾輩は猫である。名前はまだ無い。カタカナとひらがな、１２３。",
    "안녕하세요 세계! 오늘은 날씨가 정말 좋네요.",
    "Xin chào thế giới, hôm nay trời đẹp quá!",
    "Zażółć gęślą jaźń w 100% poprawnie.",
    "Pijamalı hasta yağız şoföre çabucak güvendi. İIıi",
    "ꦲꦏ꧀ꦱꦫꦗꦮ ქართული ენა հայերեն லினக்ஸ்",
)
CODE = (
    "def add(a: int, b: int = 0) -> int:\n    \"\"\"Add.\"\"\"\n    return a + b  # sum\n",
    "for (int i = 0; i < n; ++i) {\n\t\tx[i] *= 0x1F;\n}\n",
    "SELECT * FROM users WHERE name LIKE '%O''Brien%' AND id >= 1000000;",
    "<div class=\"a-b\">&nbsp;<!-- note --></div>\r\n<br/>\r\n",
    "let f = |x: &mut Vec<u8>| -> Result<(), Box<dyn Error>> { x.push(255u8); Ok(()) };",
    "{\"key\": [1, 2.5e-10, null, true], \"\\u00e9\": \"\\n\"}",
    "if __name__ == '__main__':\n        print(f\"{x!r:>{width}}\")\n\n\n",
    "https://example.org:8080/path/to/file.tar.gz?q=a%20b&x=1#frag_ment",
    "$ git log --oneline | grep -E '^[0-9a-f]{7}' | wc -l\n",
)
SYMBOLS = (
    "🙂🎉👩‍👩‍👧‍👦🇩🇪👍🏽❤️", "∑∫√≈≠±×÷∞ x²+y³=z½", "“quoted” — ‘single’ … ‹angle› «guillemets»", "ﬁ ﬂ Ⅷ ① ㍻ ｆｕｌｌ",
    "e\u0301 a\u0308 n\u0303", "\u200b\u200d\ufeff\u00ad", "I'LL we'Ve DON'T o'clock 'tis y'all'd've",
    "1234567890 12,345.678 ٠١٢ ५६",
    "!!!???...,,,;;;:::---___***###", "CamelCaseHTTPServer snake_case_name SCREAMING_CASE", "\x00\x01\x7f\x1b[0m",
)  # fmt: skip
SPACES = (" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\t\t ", " \n ", "\u00a0", "\u3000", "        ", "\v", "\f", "\u2028")


def texts(special: tuple[str, ...], count: int = 1000, seed: int = 0) -> list[str]:
    """Make `count` texts from pieces of all sorts, with the special tokens of a model among them."""
    chance = random.Random(seed)
    every = [*LANGUAGES, *CODE, *SYMBOLS, *SPACES, *special, *(f"a{token}b" for token in special)]
    found = every[:count]
    while len(found) < count:
        pieces = []
        for _ in range(chance.randrange(1, 7)):
            group = chance.choice((LANGUAGES, LANGUAGES, CODE, SYMBOLS, SPACES, special))
            piece = chance.choice(group)
            if group is not special and group is not SPACES:
                start = chance.randrange(len(piece))
                piece = piece[start : start + chance.randrange(1, 60)]
            pieces.append(piece)
        found.append(chance.choice(("", "", " ", "\n")).join(pieces))
    return found
