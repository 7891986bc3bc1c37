//! The diagnostic codes (names with explanations) of errors about training data, chat templates,
//! tokenizers and the token cache, such as `data-file-missing`.

codes! {
    DATA_FILES_NOT_GIVEN: Job = "data-files-not-given" {
        summary: "The list of data files is empty.",
        cause: "`train.data.files`, `train.eval.files`, or `files` of a source in `train.data.mixture`, is an empty list.",
        remedy: "Name files or patterns, such as `files: [\"docs/**/*.md\"]`.",
    }
    DATA_FILE_MISSING: Job = "data-file-missing" {
        summary: "A file name or pattern matches no data file.",
        cause: "The file does not exist on this host, or the path is not relative to `run.workdir`. `*` stays within one directory, `**` enters subdirectories, and neither matches names that begin with a dot; `~` is not expanded.",
        remedy: "Correct the path or the pattern, and check that every host has the files.",
    }
    DATA_PATTERN_INVALID: Job = "data-pattern-invalid" {
        summary: "A pattern of data files is malformed.",
        cause: "A bracket or brace is not closed, `**` is combined with other characters, the braces stand for more than 1024 patterns, or the pattern is longer than 64 KiB.",
        remedy: "Correct the pattern; `*`, `?`, `[a-z]`, `{a,b}` and `**` between slashes are supported.",
    }
    DATA_FILE_NOT_REGULAR: Job = "data-file-not-regular" {
        summary: "A data file is a directory, device or pipe.",
        cause: "`train.data.files` names a directory instead of the files in it.",
        remedy: "Write DIRECTORY/** for every file below a directory.",
    }
    DATA_FILE_UNREADABLE: Job = "data-file-unreadable" {
        summary: "A data file or its directory could not be read.",
        cause: "The file was removed, its permissions forbid reading, or the storage failed.",
        remedy: "Check the path and its permissions on every host.",
    }
    DATA_FILE_CHANGED: Job = "data-file-changed" {
        summary: "A data file changed while it was read.",
        cause: "Another process writes to the file, or a pattern matches files that the run itself writes.",
        remedy: "Start the job again when no process writes to the data.",
    }
    DATA_FILE_COMPRESSED: Job = "data-file-compressed" {
        summary: "A data file has a compressed or binary format that launch does not read.",
        cause: "The name ends in .gz, .zst, .xz, .bz2, .zip or .arrow.",
        remedy: "Decompress the file, or convert it to Parquet or JSON lines.",
    }
    DATA_NOT_UTF8: Job = "data-not-utf8" {
        summary: "A text or JSON lines file is not UTF-8.",
        cause: "The file has another encoding, such as Latin-1, or holds binary data.",
        remedy: "Convert the file (`iconv -t UTF-8`) or exclude it from `train.data.files`.",
    }
    DATA_EMPTY: Job = "data-empty" {
        summary: "No file of a data source contains text or a record.",
        cause: "The files have no bytes, or only blank lines.",
        remedy: "Name files with text, or JSON lines files with a record on each line.",
    }
    DATA_RECORD_INVALID: Job = "data-record-invalid" {
        summary: "A line of a JSON lines file, or a row of a Parquet file, is not a usable record.",
        cause: "The line is not a JSON object, is cut off, or its field is not a string. Or the line or the row is longer than 16 MiB.",
        remedy: "Correct the line or row that the message names; each line must be one JSON object.",
    }
    DATA_FIELD_MISSING: Job = "data-field-missing" {
        summary: "A record or a Parquet file does not have the field that `train.data.field` names.",
        cause: "The data use another name for the text or the messages, or the field of one record is null.",
        remedy: "Set `train.data.field` to one of the fields that the message lists.",
    }
    DATA_FIELD_INVALID: Job = "data-field-invalid" {
        summary: "The field of a Parquet row has a type that launch does not read.",
        cause: "The column does not contain strings, or a chat contains values that have no JSON form or more than 32 levels of nesting.",
        remedy: "Set `train.data.field` to a column of strings, or convert the column.",
    }
    PARQUET_UNREADABLE: Job = "parquet-unreadable" {
        summary: "A Parquet file could not be decoded.",
        cause: "The file is damaged or cut off, is not a Parquet file, or uses a codec other than Snappy and Zstandard.",
        remedy: "Write the file again, for example with pyarrow, and compare its size with the original.",
    }
    PARQUET_TOO_MANY_COLUMNS: Job = "parquet-too-many-columns" {
        summary: "A Parquet file has more than 4096 columns.",
        cause: "The file is a feature table instead of text records.",
        remedy: "Write the columns with the text or the messages to another file.",
    }
    DATA_FORMAT_NOT_CHAT: Job = "data-format-not-chat" {
        summary: "A plain text file was named for data with `train.data.format: chat`.",
        cause: "Chats are records of .jsonl, .ndjson or .parquet files.",
        remedy: "Name files with records, or set `train.data.format: text`.",
    }
    CHAT_MESSAGES_INVALID: Job = "chat-messages-invalid" {
        summary: "The messages of a chat record have the wrong form.",
        cause: "The field is not a list, the list is empty, a message has no role, or a message contains U+F70A1 or U+F70A2.",
        remedy: "Give each record a list of objects such as {\"role\": \"user\", \"content\": \"...\"}.",
    }
    CHAT_WITHOUT_ASSISTANT: Job = "chat-without-assistant" {
        summary: "A chat record has no text of the assistant, so no token of the record would count for the loss.",
        cause: "The record has no message with the role assistant, or the template writes nothing for it.",
        remedy: "Remove the record, or set `train.data.loss_on: all`.",
    }
    CHAT_TARGETS_AMBIGUOUS: Job = "chat-targets-ambiguous" {
        summary: "The text of an assistant message cannot be located in the rendered chat.",
        cause: "The chat template has no generation tags, and renders earlier messages differently when later messages follow.",
        remedy: "Enclose the assistant's text in `{% generation %}` and `{% endgeneration %}` in the template, or set `train.data.loss_on: all`.",
    }
    CHAT_TEMPLATE_FAILED: Job = "chat-template-failed" {
        summary: "The chat template failed on a record.",
        cause: "The template called raise_exception, used an undefined value, looped too long, or its generation tags are not paired.",
        remedy: "Correct the record, or the line of the template that the message names.",
    }
    CHAT_TEMPLATE_MISSING: Job = "chat-template-missing" {
        summary: "There is no chat template for data with `train.data.format: chat`.",
        cause: "`train.data.chat_template` names a file that does not exist, or the key is absent and the tokenizer has no template.",
        remedy: "Set `train.data.chat_template` to a Jinja file, or set `train.data.format: text`.",
    }
    CHAT_TEMPLATE_INVALID: Job = "chat-template-invalid" {
        summary: "The chat template cannot be used.",
        cause: "The template is not valid Jinja, is larger than 1 MiB, is not UTF-8, or tokenizer_config.json lists several templates without a default.",
        remedy: "Correct the template, or set `train.data.chat_template` to a Jinja file.",
    }

    TOKENIZER_MISSING: Job = "tokenizer-missing" {
        summary: "The file of the tokenizer does not exist.",
        cause: "`train.data.tokenizer` is not the path of a tokenizer.json or of its directory; relative paths start at `run.workdir`.",
        remedy: "Correct `train.data.tokenizer`, and check that every host has the file.",
    }
    TOKENIZER_UNREADABLE: Job = "tokenizer-unreadable" {
        summary: "A file of the tokenizer could not be read.",
        cause: "The permissions forbid reading, the file is not a regular file in UTF-8, or it is too large. The limit is 64 MiB for tokenizer.json, and 16 MiB for other files.",
        remedy: "Check the file and its permissions on every host.",
    }
    TOKENIZER_INVALID: Job = "tokenizer-invalid" {
        summary: "A file of the tokenizer has the wrong content.",
        cause: "tokenizer.json is not a Hugging Face fast tokenizer, or a companion file is not JSON.",
        remedy: "Save the tokenizer again with `AutoTokenizer.from_pretrained(...).save_pretrained(...)`.",
    }
    TOKENIZER_UNSUPPORTED: Job = "tokenizer-unsupported" {
        summary: "The tokenizer has a token id that is too large.",
        cause: "The largest token id must be below 2^24, because an embedding row is allocated for each id.",
        remedy: "Renumber the tokens, or use another tokenizer.",
    }
    TOKENIZER_EOS_UNKNOWN: Job = "tokenizer-eos-unknown" {
        summary: "The tokenizer does not state which token ends a document.",
        cause: "The eos_token of tokenizer_config.json is not in tokenizer.json, or neither file names an end-of-sequence token.",
        remedy: "Set \"eos_token\" in the tokenizer_config.json next to tokenizer.json to one of its tokens.",
    }
    TOKENIZER_FAILED: Job = "tokenizer-failed" {
        summary: "The tokenizer failed on a text.",
        cause: "A rule of tokenizer.json has no result for the text, such as an unknown word without an unk_token.",
        remedy: "Correct the tokenizer, or remove the text.",
    }

    DATA_LIMIT_EXCEEDED: Job = "data-limit-exceeded" {
        summary: "A tokenizer, chat template or Parquet file needs more memory, CPU time, stack or output than its limit.",
        cause: "The library that interprets the file runs in a sandbox process with limits. A malformed or malicious file can exceed the limits. So can a rule that is slow on a record, such as a regular expression with nested repetitions. The text of a Parquet file has at most 64 bytes per byte of the file, or 64 MiB.",
        remedy: "Check the tokenizer or template and the record that the message names. Shorten the record, or use the files of a source that you trust.",
    }
    SANDBOX_FAILED: Cluster = "sandbox-failed" {
        summary: "The sandbox process ended, or its reply was invalid.",
        cause: "The kernel (because memory ran out) or another process killed the sandbox process, or a library has a defect.",
        remedy: "Start the job again, and watch the memory of the host.",
    }
    SANDBOX_UNAVAILABLE: Cluster = "sandbox-unavailable" {
        summary: "The sandbox process, which interprets tokenizers, chat templates and Parquet files, did not start.",
        cause: "/proc is not mounted, the limit of processes (ulimit -u) is reached, or a limit of memory is too low.",
        remedy: "Mount /proc, and raise the limits of the user on the host.",
    }
    SANDBOX_INCOMPLETE: Cluster = "sandbox-incomplete" {
        summary: "The kernel lacks a facility that confines the sandbox process.",
        cause: "The kernel or the container has no seccomp. Limits of memory, CPU time and output apply, but a library with a defect could open files and connections.",
        remedy: "Use only data, tokenizers and templates from sources that you trust, or a kernel with seccomp.",
    }

    DATA_SEQUENCE_LENGTH_INVALID: Job = "data-sequence-length-invalid" {
        summary: "`train.data.seq_len` is 0.",
        cause: "A sample needs at least one input token.",
        remedy: "Set `train.data.seq_len` to at least 1.",
    }
    DATA_HELD_OUT_INVALID: Job = "data-held-out-invalid" {
        summary: "`train.data.held_out` is not a share from 0 to below 1.",
        cause: "The value is negative, 1 or more, or not a number.",
        remedy: "Set `train.data.held_out` to a share such as 0.05.",
    }
    DATA_TOO_SHORT: Job = "data-too-short" {
        summary: "The data have fewer tokens than one sample needs.",
        cause: "`train.data.seq_len` is longer than all documents together, or the held-out share is too small.",
        remedy: "Add data, lower `train.data.seq_len`, or raise `train.data.held_out` for evaluation.",
    }
    EVAL_DATA_MISSING: Job = "eval-data-missing" {
        summary: "Evaluation was requested without held-out data.",
        cause: "`train.eval.files` is empty and `train.data.held_out` is 0.",
        remedy: "Set `train.data.held_out`, for example to 0.05, or name `train.eval.files`.",
    }
    EVAL_FORMAT_AMBIGUOUS: Job = "eval-format-ambiguous" {
        summary: "The format of `train.eval.files` is ambiguous.",
        cause: "The sources of the mixture differ in format, field or loss_on, and the files could have any of these forms.",
        remedy: "Use `train.data.held_out` instead of `train.eval.files`, or give all sources the same format.",
    }

    TOKEN_CACHE_UNUSABLE: Cluster = "token-cache-unusable" {
        summary: "The directory of the token cache could not be read or written.",
        cause: "The directory belongs to another user, is on a read-only file system, or its disk is full.",
        remedy: "Set `train.data.cache` to a writable directory with free space.",
    }
    TOKEN_CACHE_CORRUPT: Cluster = "token-cache-corrupt" {
        summary: "A file of the token cache differs from the data that was written.",
        cause: "The storage lost or changed bytes, another program wrote to the file, or an incompatible version of launch wrote it.",
        remedy: "After a warning, nothing is required, because launch rebuilds the cache. If the rebuilt cache is also corrupt, check the storage, or set `train.data.cache` to another directory.",
    }
}
