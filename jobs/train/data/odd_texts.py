"""Texts that tokenizers most often read differently."""

# ruff: noqa: RUF001 - characters that look like others are the point

ODD_TEXTS = (
    "",
    " ",
    "\t\r\n\x0b\x0c\x1c\x85\u00a0\u2028\u3000 a\u200bb\ufeffc",
    "control \x01\x02\x7f\x80\x9f characters\x00 and \ufffd replacement",
    "[CLS] special [SEP] tokens [MASK][PAD]in[UNK]text [mask] [ SEP ]",
    "café cafe\u0301 Ångström ÅNGSTRÖM naïve Straße ẞ ŒUVRE fi ﬁ ＦＵＬＬ",
    "İstanbul ıI ΟΔΥΣΣΕΥΣ Σ ς ǅ K Å µ",
    "漢字かな交じり文、日本語。한국어 텍스트 中文繁體 𠀀𪚥",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈🇩🇪👍🏽 ☎️ \U0010ffff\ue000",
    "हिन्दी ประเทศไทย العربيّة עִבְרִית тест Ёлка",
    "e\u0301\u0302\u0303\u0304\u0305" * 10,
    "x" * 99 + " " + "y" * 100 + " " + "z" * 101 + " " + "ab-" * 200,
    "w" * 5000 + "." * 500 + "\u0301" * 300,
    "a_b__c d.e,f;g:h!i?j'k\"l(m)n[o]p{q}r|s\\t/u<v>w=x+y*z&#@$%^~`–—…“”‘’«»¿¡§¶€£¥©®™°±²³¼½×÷",
    "http://example.org/a?b=c&d=e#f 1,234.56 3.14e-10 0xDEADBEEF foo@bar.com C++ .NET",
    "##ing ##ed # # ## [unused1] <s></s> <pad>",
)
