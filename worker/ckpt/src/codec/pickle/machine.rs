//! [`PickleMachine`]: parses a pickle by executing its opcodes, which build a tree of values and
//! never run Python code.
use super::tree::{
    MEMO_ENTRIES_MAX, NodeIndex, PickleCall, PickleNode, PickleTree, PickleValue, TextRange, VALUES_MAX,
};
use crate::error::PickleError;
use crate::format_constants::PICKLE_BYTES_MAX;

/// The result of executing opcodes of a pickle: a value, or the [`PickleError`] because of which
/// the pickle is rejected.
type Result<T> = std::result::Result<T, PickleError>;

/// Parses the bytes `input`, which must be exactly one pickle, and returns the tree of its values.
/// `globals` lists the classes and functions that the pickle may name, as `module.name`.
///
/// # Errors
/// Fails if the pickle is invalid, exceeds a limit, names another class or function, or ends before
/// the input does.
pub(crate) fn parse_pickle(input: &[u8], globals: &[&[&'static str]]) -> Result<PickleTree> {
    if input.len() as u64 > PICKLE_BYTES_MAX {
        return Err(PickleError::TooLarge { bytes: input.len() as u64 });
    }
    let (tree, end) = parse_first_pickle(input, globals)?;
    if end != input.len() {
        return Err(PickleError::TrailingData { end, size: input.len() });
    }
    Ok(tree)
}

/// Parses the pickle at the beginning of `input`, which may be followed by more bytes. Returns the
/// values of the pickle and its length in bytes. `globals` lists the classes and functions that the
/// pickle may name, as `module.name`.
pub(crate) fn parse_first_pickle(input: &[u8], globals: &[&[&'static str]]) -> Result<(PickleTree, usize)> {
    let mut machine = PickleMachine {
        input,
        at: 0,
        globals,
        stack: Vec::new(),
        marks: Vec::new(),
        nodes: Vec::new(),
        texts: String::new(),
        memo: Vec::new(),
        memo_entries: 0,
        pushed: 0,
    };
    let root = machine.run()?;
    let PickleMachine { at, nodes, texts, .. } = machine;
    let tree = PickleTree { nodes, texts, root };
    tree.check_structure()?;
    Ok((tree, at))
}

/// The state of the machine that executes the opcodes of a pickle: input, stack, memo and tree of
/// values.
struct PickleMachine<'a> {
    input: &'a [u8],
    /// Offset of the next opcode or argument in `input`.
    at: usize,
    /// The classes and functions that the pickle may name.
    globals: &'a [&'a [&'static str]],
    stack: Vec<PickleValue>,
    /// Height of the stack at each mark.
    marks: Vec<usize>,
    nodes: Vec<PickleNode>,
    /// All texts of the pickle, one after another.
    texts: String,
    /// The memo entry of each index, or `None` for an index that was not stored.
    memo: Vec<Option<PickleValue>>,
    /// Number of memo entries that were stored.
    memo_entries: usize,
    /// Values pushed or copied so far. Limited to [`VALUES_MAX`], which bounds the memory.
    pushed: usize,
}

impl<'a> PickleMachine<'a> {
    /// Executes all opcodes up to the end of the pickle, and returns the pickled value, which the
    /// last opcode takes from the top of the stack.
    fn run(&mut self) -> Result<PickleValue> {
        loop {
            let op = self.take_bytes(1)?[0];
            if op == b'.' {
                return self.pop();
            }
            self.execute_opcode(op)?;
        }
    }

    /// Executes the pickle opcode `op`, whose arguments are read from the input.
    fn execute_opcode(&mut self, op: u8) -> Result<()> {
        match op {
            0x80 => self.check_protocol(),
            0x95 => self.check_frame(),
            b'(' => self.push_mark(),
            b'0' => self.pop().map(|_| ()),
            b'1' => self.pop_mark().map(|_| ()),
            b'2' => self.peek().and_then(|v| self.push(v)),
            b'N' => self.push(PickleValue::None),
            0x88 => self.push(PickleValue::Bool(true)),
            0x89 => self.push(PickleValue::Bool(false)),
            b'J' => self.push_int(4, true),
            b'K' => self.push_int(1, false),
            b'M' => self.push_int(2, false),
            0x8a => self.push_long(1),
            0x8b => self.push_long(4),
            b'G' => self.push_float(),
            b'X' => self.push_text(4),
            0x8c => self.push_text(1),
            0x8d => self.push_text(8),
            b'T' | b'B' => self.push_bytes_placeholder(4),
            b'U' | b'C' => self.push_bytes_placeholder(1),
            0x8e | 0x96 => self.push_bytes_placeholder(8),
            b'}' => self.push_node(PickleNode::Dict(Vec::new())),
            b']' => self.push_node(PickleNode::List(Vec::new())),
            b')' => self.push_node(PickleNode::Tuple(Vec::new())),
            0x8f => self.push_node(PickleNode::Set(Vec::new())),
            b't' => self.push_marked_collection(PickleNode::Tuple),
            b'l' => self.push_marked_collection(PickleNode::List),
            0x91 => self.push_marked_collection(PickleNode::Set),
            b'd' => self.push_dict(),
            0x85 => self.push_tuple(1),
            0x86 => self.push_tuple(2),
            0x87 => self.push_tuple(3),
            b'a' => self.append_item(),
            b'e' | 0x90 => self.append_marked_items(),
            b's' => self.set_item(),
            b'u' => self.set_marked_items(),
            b'q' => self.take_size(1).and_then(|i| self.store_memo(i)),
            b'r' => self.take_size(4).and_then(|i| self.store_memo(i)),
            0x94 => self.store_memo(self.memo_entries),
            b'h' => self.take_size(1).and_then(|i| self.push_memo(i)),
            b'j' => self.take_size(4).and_then(|i| self.push_memo(i)),
            b'c' => self.push_global_from_lines(),
            0x93 => self.push_global_from_stack(),
            b'R' => self.push_call_result(),
            0x81 => self.push_new_object(false),
            0x92 => self.push_new_object(true),
            b'b' => self.set_object_state(),
            b'Q' => self.pop().and_then(|v| self.push_node(PickleNode::Persistent(v))),
            opcode => Err(PickleError::UnsupportedOpcode { opcode }),
        }
    }

    /// Takes the next `n` bytes of the input.
    fn take_bytes(&mut self, n: usize) -> Result<&'a [u8]> {
        let rest = &self.input[self.at..];
        let truncated = PickleError::Truncated { at: self.at, claimed: n, left: rest.len() };
        let taken = rest.get(..n).ok_or(truncated)?;
        self.at += n;
        Ok(taken)
    }

    /// Takes an unsigned little-endian number of `width` bytes from the input.
    fn take_size(&mut self, width: usize) -> Result<usize> {
        let mut wide = [0u8; 8];
        wide[..width].copy_from_slice(self.take_bytes(width)?);
        usize::try_from(u64::from_le_bytes(wide)).map_err(|_| PickleError::SizeOverflow)
    }

    /// Pushes a value to the stack. Fails if the pickle has pushed more than [`VALUES_MAX`] values.
    fn push(&mut self, value: PickleValue) -> Result<()> {
        self.add_to_value_count(1)?;
        self.stack.push(value);
        Ok(())
    }

    /// Adds `n` to the count of values that the untrusted pickle has created so far, which is
    /// limited to protect memory. Fails if the number exceeds [`VALUES_MAX`].
    fn add_to_value_count(&mut self, n: usize) -> Result<()> {
        self.pushed = self.pushed.saturating_add(n);
        match self.pushed > VALUES_MAX {
            true => Err(PickleError::Limit { what: "values", limit: VALUES_MAX }),
            false => Ok(()),
        }
    }

    /// Adds the list, dict or other composite value `node` to the tree of values, and pushes a
    /// reference to it to the stack.
    fn push_node(&mut self, node: PickleNode) -> Result<()> {
        let id = NodeIndex::try_from(self.nodes.len()).map_err(|_| PickleError::SizeOverflow)?;
        self.push(PickleValue::Node(id))?;
        self.nodes.push(node);
        Ok(())
    }

    /// Returns the number of values on the stack below the most recent mark of the pickle, or 0 if
    /// there is no mark. Values below that height must not be popped.
    fn last_mark_height(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    /// Returns the value on top of the stack without popping it. Fails if the stack has no value
    /// above the last mark.
    fn peek(&self) -> Result<PickleValue> {
        let above_mark = self.stack.get(self.last_mark_height()..).unwrap_or_default();
        above_mark.last().copied().ok_or(PickleError::StackUnderflow)
    }

    /// Pops a value from the stack. Fails if the stack has no value above the last mark.
    fn pop(&mut self) -> Result<PickleValue> {
        let value = self.peek()?;
        self.stack.pop();
        Ok(value)
    }

    /// Returns the string, list, dict or other composite value to which the stack value `value`
    /// refers, or `None` for a simple value.
    fn node(&self, value: PickleValue) -> Option<&PickleNode> {
        match value {
            PickleValue::Node(id) => self.nodes.get(id as usize),
            _ => None,
        }
    }

    /// Returns the node of the tree to which the value on top of the stack refers, without popping
    /// the value. Fails if the value on top is not a node.
    fn peek_node(&mut self) -> Result<&mut PickleNode> {
        match self.peek()? {
            PickleValue::Node(id) => self.nodes.get_mut(id as usize).ok_or(PickleError::StackUnderflow),
            _ => Err(PickleError::WrongType("adds items to a value that is not a container")),
        }
    }

    /// Records the current number of values on the stack as a mark, as the MARK opcode of pickles
    /// requires. Fails if there are [`VALUES_MAX`] marks.
    fn push_mark(&mut self) -> Result<()> {
        if self.marks.len() >= VALUES_MAX {
            return Err(PickleError::Limit { what: "marks", limit: VALUES_MAX });
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// Pops the most recent mark and every value above it. Returns the values in the order of the
    /// stack.
    fn pop_mark(&mut self) -> Result<Vec<PickleValue>> {
        let mark = self.marks.pop().ok_or(PickleError::StackUnderflow)?;
        Ok(self.stack.split_off(mark))
    }

    /// Takes the protocol number from the input, and fails if the number is above 5.
    fn check_protocol(&mut self) -> Result<()> {
        match self.take_bytes(1)?[0] {
            0..=5 => Ok(()),
            other => Err(PickleError::UnsupportedProtocol { protocol: other }),
        }
    }

    /// Reads the length of the next pickle frame, and fails if the frame is longer than the rest of
    /// the input.
    fn check_frame(&mut self) -> Result<()> {
        let (len, left) = (self.take_size(8)?, self.input.len() - self.at);
        match len <= left {
            true => Ok(()),
            false => Err(PickleError::Truncated { at: self.at, claimed: len, left }),
        }
    }

    /// Takes a little-endian integer of `width` bytes from the input and pushes it. With `signed`,
    /// `width` must be 4.
    fn push_int(&mut self, width: usize, signed: bool) -> Result<()> {
        let n = self.take_size(width)? as i64;
        self.push(PickleValue::Int(if signed { i64::from(n as u32 as i32) } else { n }))
    }

    /// Takes a signed integer of any length from the input and pushes it. The input states the
    /// length in `width` bytes. The value of an integer beyond 64 bits is dropped.
    fn push_long(&mut self, width: usize) -> Result<()> {
        let len = self.take_size(width)?;
        let digits = self.take_bytes(len)?;
        if len > 8 {
            return self.push_node(PickleNode::BigInt);
        }
        let negative = digits.last().is_some_and(|b| b & 0x80 != 0);
        let mut wide = if negative { [0xffu8; 8] } else { [0u8; 8] };
        wide[..len].copy_from_slice(digits);
        self.push(PickleValue::Int(i64::from_le_bytes(wide)))
    }

    /// Takes a big-endian f64 from the input and pushes it.
    fn push_float(&mut self) -> Result<()> {
        let mut wide = [0u8; 8];
        wide.copy_from_slice(self.take_bytes(8)?);
        self.push(PickleValue::Float(f64::from_be_bytes(wide)))
    }

    /// Takes UTF-8 text from the input and pushes it. The input states the length in `width` bytes.
    fn push_text(&mut self, width: usize) -> Result<()> {
        let len = self.take_size(width)?;
        let text = std::str::from_utf8(self.take_bytes(len)?)
            .map_err(|_| PickleError::InvalidUtf8 { at: self.at })?;
        let overflow = |_| PickleError::SizeOverflow;
        let start = u32::try_from(self.texts.len()).map_err(overflow)?;
        let length = u32::try_from(text.len()).map_err(overflow)?;
        self.texts.push_str(text);
        self.push_node(PickleNode::Str(TextRange { start, length }))
    }

    /// Skips a byte string in the input, and pushes a placeholder instead of it, because its
    /// content is never needed. The input states the length in `width` bytes.
    fn push_bytes_placeholder(&mut self, width: usize) -> Result<()> {
        let len = self.take_size(width)?;
        self.take_bytes(len)?;
        self.push_node(PickleNode::Bytes)
    }

    /// Pops all values above the most recent mark, and pushes the one list, tuple, set or dict that
    /// the callback `make` creates from these values.
    fn push_marked_collection(&mut self, make: impl Fn(Vec<PickleValue>) -> PickleNode) -> Result<()> {
        let values = self.pop_mark()?;
        self.push_node(make(values))
    }

    /// Pops the keys and values above the last mark and pushes a dict that contains them.
    fn push_dict(&mut self) -> Result<()> {
        let values = self.pop_mark()?;
        self.push_node(PickleNode::Dict(pair_up(&values)?))
    }

    /// Pops `n` values and pushes a tuple that contains them.
    fn push_tuple(&mut self, n: usize) -> Result<()> {
        let start = self
            .stack
            .len()
            .checked_sub(n)
            .filter(|&s| s >= self.last_mark_height())
            .ok_or(PickleError::StackUnderflow)?;
        let values = self.stack.split_off(start);
        self.push_node(PickleNode::Tuple(values))
    }

    /// Pops a value and appends it to the list or set below it.
    fn append_item(&mut self) -> Result<()> {
        let value = self.pop()?;
        self.append_values(&[value])
    }

    /// Pops the values above the last mark and appends them to the list or set below the mark.
    fn append_marked_items(&mut self) -> Result<()> {
        let values = self.pop_mark()?;
        self.append_values(&values)
    }

    /// Appends values to the list or set on top of the stack.
    fn append_values(&mut self, values: &[PickleValue]) -> Result<()> {
        match self.peek_node()? {
            PickleNode::List(list) | PickleNode::Set(list) => {
                list.extend_from_slice(values);
                Ok(())
            }
            _ => Err(PickleError::WrongType("appends to a value that is not a list")),
        }
    }

    /// Pops a value and a key and sets the item of the dict below them.
    fn set_item(&mut self) -> Result<()> {
        let value = self.pop()?;
        let key = self.pop()?;
        self.insert_pairs(&[key, value])
    }

    /// Pops the keys and values above the last mark and sets the items of the dict below the mark.
    fn set_marked_items(&mut self) -> Result<()> {
        let values = self.pop_mark()?;
        self.insert_pairs(&values)
    }

    /// Inserts alternating keys and values into the dict on top of the stack.
    fn insert_pairs(&mut self, values: &[PickleValue]) -> Result<()> {
        match self.peek_node()? {
            PickleNode::Dict(pairs) => {
                pairs.extend(pair_up(values)?);
                Ok(())
            }
            _ => Err(PickleError::WrongType("sets items of a value that is not a dict")),
        }
    }

    /// Stores the value on top of the stack as entry number `index` of the pickle's memo, from
    /// which later opcodes can push it again.
    fn store_memo(&mut self, index: usize) -> Result<()> {
        let value = self.peek()?;
        if index >= MEMO_ENTRIES_MAX {
            return Err(PickleError::Limit { what: "memo entries", limit: MEMO_ENTRIES_MAX });
        }
        if index >= self.memo.len() {
            self.memo.resize(index + 1, None);
        }
        self.memo_entries += usize::from(self.memo[index].is_none());
        self.memo[index] = Some(value);
        Ok(())
    }

    /// Pushes the value that the pickle's memo has under the number `index`.
    fn push_memo(&mut self, index: usize) -> Result<()> {
        let known = self.memo.get(index).copied().flatten();
        self.push(known.ok_or(PickleError::UnknownMemoEntry { index })?)
    }

    /// Takes the text up to the next line end from the input.
    fn take_line(&mut self) -> Result<&'a str> {
        let rest = &self.input[self.at..];
        let Some(end) = rest.iter().position(|&b| b == b'\n') else {
            return Err(PickleError::UnterminatedName { at: self.at });
        };
        self.at += end + 1;
        std::str::from_utf8(&rest[..end]).map_err(|_| PickleError::InvalidUtf8 { at: self.at })
    }

    /// Takes two lines with a module and a name from the input, and pushes the class or function
    /// that they name.
    fn push_global_from_lines(&mut self) -> Result<()> {
        let (module, name) = (self.take_line()?, self.take_line()?);
        self.push_global(module, name)
    }

    /// Pops a name and a module, and pushes the class or function that they name.
    fn push_global_from_stack(&mut self) -> Result<()> {
        let (name, module) = (self.pop()?, self.pop()?);
        let text = |v| match self.node(v) {
            Some(PickleNode::Str(range)) => Ok(range.slice_text(&self.texts).to_owned()),
            _ => Err(PickleError::WrongType("names a class by a value that is not text")),
        };
        let (module, name) = (text(module)?, text(name)?);
        self.push_global(&module, &name)
    }

    /// Pushes a reference to the Python class or function `module.name`.
    ///
    /// # Errors
    /// Fails with [`PickleError::ForbiddenGlobal`] if `globals` does not list the name.
    fn push_global(&mut self, module: &str, name: &str) -> Result<()> {
        let known = |g: &&&'static str| {
            g.strip_prefix(module).and_then(|rest| rest.strip_prefix('.')).is_some_and(|rest| rest == name)
        };
        match self.globals.iter().flat_map(|list| list.iter()).find(known) {
            Some(global) => self.push_node(PickleNode::Global(global)),
            None => {
                let shown: String = module
                    .chars()
                    .chain(['.'])
                    .chain(name.chars())
                    .filter(|c| !c.is_control())
                    .take(120)
                    .collect();
                Err(PickleError::ForbiddenGlobal { name: shown })
            }
        }
    }

    /// Pops the arguments of a call from the stack of the pickle machine, and then the Python class
    /// or function that the pickle calls. Returns the callee's name and the arguments. Fails if the
    /// callee is not a class or function, or the arguments are not a tuple.
    fn pop_call(&mut self) -> Result<(&'static str, PickleValue)> {
        let (args, class) = (self.pop()?, self.pop()?);
        match (self.node(class), self.node(args)) {
            (Some(PickleNode::Global(class)), Some(PickleNode::Tuple(_))) => Ok((class, args)),
            _ => Err(PickleError::WrongType("calls a value that is not a class or function")),
        }
    }

    /// Pops a class or function and its arguments, and pushes a record of the call instead of
    /// executing it. A call of `OrderedDict` becomes a dict.
    fn push_call_result(&mut self) -> Result<()> {
        let (class, args) = self.pop_call()?;
        match class {
            "collections.OrderedDict" => {
                let pairs = self.read_ordered_dict_pairs(args)?;
                self.push_node(PickleNode::Dict(pairs))
            }
            _ => self.push_node(PickleNode::Object(Box::new(PickleCall {
                class,
                args,
                state: PickleValue::None,
            }))),
        }
    }

    /// Returns the key-value pairs of an `OrderedDict` that the pickle creates, from `args`, the
    /// arguments of the constructor call in the pickle. Counts the copied values, since a pickle
    /// could copy a shared list many times.
    fn read_ordered_dict_pairs(&mut self, args: PickleValue) -> Result<Vec<(PickleValue, PickleValue)>> {
        let values = |v: PickleValue| match self.node(v)? {
            PickleNode::List(v) | PickleNode::Tuple(v) => Some(v.as_slice()),
            _ => None,
        };
        /// The error for a pickle that constructs an `OrderedDict` from items that are not pairs of
        /// a key and a value.
        const NOT_PAIRS_ERROR: PickleError =
            PickleError::WrongType("makes an OrderedDict from values that are not pairs");
        let list = match values(args).ok_or(NOT_PAIRS_ERROR)? {
            [] => return Ok(Vec::new()),
            [list] => values(*list).ok_or(NOT_PAIRS_ERROR)?,
            _ => return Err(NOT_PAIRS_ERROR),
        };
        if list.len() > VALUES_MAX - self.pushed {
            return Err(PickleError::Limit { what: "values", limit: VALUES_MAX });
        }
        let pair = |&v: &PickleValue| match values(v) {
            Some(&[key, value]) => Ok((key, value)),
            _ => Err(NOT_PAIRS_ERROR),
        };
        let pairs: Vec<_> = list.iter().map(pair).collect::<Result<_>>()?;
        self.add_to_value_count(pairs.len())?;
        Ok(pairs)
    }

    /// Pops a class and the arguments of its `__new__`, and pushes a record of the call instead of
    /// executing it. With `with_keywords`, first pops keyword arguments. Fails if these are not
    /// empty.
    fn push_new_object(&mut self, with_keywords: bool) -> Result<()> {
        if with_keywords {
            let keywords = self.pop()?;
            if !matches!(self.node(keywords), Some(PickleNode::Dict(pairs)) if pairs.is_empty()) {
                return Err(PickleError::WrongType("makes an object with keyword arguments"));
            }
        }
        let (class, args) = self.pop_call()?;
        match class {
            "collections.OrderedDict" => self.push_node(PickleNode::Dict(Vec::new())),
            _ => self.push_node(PickleNode::Object(Box::new(PickleCall {
                class,
                args,
                state: PickleValue::None,
            }))),
        }
    }

    /// Executes the opcode BUILD: pops the state of a Python object, such as its attributes, and
    /// stores it in the object that is then on top of the stack. If a dict is below the value, the
    /// value is dropped.
    fn set_object_state(&mut self) -> Result<()> {
        let given = self.pop()?;
        match self.peek_node()? {
            PickleNode::Object(call) => {
                call.state = given;
                Ok(())
            }
            // ignores attributes of an OrderedDict, such as the module versions of a state_dict
            PickleNode::Dict(_) => Ok(()),
            _ => Err(PickleError::WrongType("sets the state of a value that is not an object")),
        }
    }
}

/// Groups `values`, in which keys and values alternate, into pairs. Fails if the last key has no
/// value.
fn pair_up(values: &[PickleValue]) -> Result<Vec<(PickleValue, PickleValue)>> {
    let (pairs, rest) = values.as_chunks::<2>();
    match rest.is_empty() {
        true => Ok(pairs.iter().map(|&[key, value]| (key, value)).collect()),
        false => Err(PickleError::KeyWithoutValue),
    }
}
