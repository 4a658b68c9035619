/* model/regex_translate.h - an Oniguruma expression in PCRE2's words. */
#pragma once

#include "model/tokenizer.h"

/* Appends the translation to *out. UNSUPPORTED names the form that weft does not translate. */
weft_status weft__regex_translate(const char *pattern, size_t length, weft_text *out);
