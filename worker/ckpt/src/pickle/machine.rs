//! The virtual machine that turns the opcodes of a pickle into values.
use super::error::PickleError;
use super::{BYTES_MAX, MEMO_MAX, Node, NodeIndex, Tree, VALUES_MAX, Value};
use std::collections::HashMap;

type Result<T> = std::result::Result<T, PickleError>;

/// Reads one pickle that fills `input`. `globals` lists the classes and functions that the pickle
/// may name, as `module.name`.
pub(crate) fn load(input: &[u8], globals: &[&[&'static str]]) -> Result<Tree> {
    if input.len() as u64 > BYTES_MAX {
        return Err(PickleError::TooLarge { bytes: input.len() as u64 });
    }
    let (tree, end) = load_first(input, globals)?;
    if end != input.len() {
        return Err(PickleError::TrailingData { end, size: input.len() });
    }
    Ok(tree)
}

/// Reads the pickle at the beginning of `input`; returns its values and its length in bytes.
pub(crate) fn load_first(input: &[u8], globals: &[&[&'static str]]) -> Result<(Tree, usize)> {
    let mut machine = Machine {
        input,
        at: 0,
        globals,
        stack: Vec::new(),
        marks: Vec::new(),
        nodes: Vec::new(),
        memo: HashMap::new(),
        pushed: 0,
    };
    let root = machine.run()?;
    let (at, tree) = (machine.at, Tree { nodes: machine.nodes, root });
    tree.check_depth()?;
    Ok((tree, at))
}

struct Machine<'a> {
    input: &'a [u8],
    at: usize,
    globals: &'a [&'a [&'static str]],
    stack: Vec<Value>,
    /// Heights of the stack at each mark.
    marks: Vec<usize>,
    nodes: Vec<Node>,
    memo: HashMap<u32, Value>,
    /// Values pushed so far; bounds the memory.
    pushed: usize,
}

impl<'a> Machine<'a> {
    /// Executes all opcodes up to the end of the pickle; returns the value on top of the stack.
    fn run(&mut self) -> Result<Value> {
        loop {
            let op = self.take(1)?[0];
            if op == b'.' {
                return self.pop();
            }
            self.execute_opcode(op)?;
        }
    }

    fn execute_opcode(&mut self, op: u8) -> Result<()> {
        match op {
            0x80 => self.read_protocol(),
            0x95 => self.read_frame(),
            b'(' => self.push_mark(),
            b'0' => self.pop().map(|_| ()),
            b'1' => self.pop_mark().map(|_| ()),
            b'2' => self.top().and_then(|v| self.push(v)),
            b'N' => self.push(Value::None),
            0x88 => self.push(Value::Bool(true)),
            0x89 => self.push(Value::Bool(false)),
            b'J' => self.push_number(4, true),
            b'K' => self.push_number(1, false),
            b'M' => self.push_number(2, false),
            0x8a => self.push_long(1),
            0x8b => self.push_long(4),
            b'G' => self.push_float(),
            b'X' => self.push_text(4),
            0x8c => self.push_text(1),
            0x8d => self.push_text(8),
            b'T' | b'B' => self.push_bytes(4),
            b'U' | b'C' => self.push_bytes(1),
            0x8e | 0x96 => self.push_bytes(8),
            b'}' => self.push_node(Node::Dict(Vec::new())),
            b']' => self.push_node(Node::List(Vec::new())),
            b')' => self.push_node(Node::Tuple(Vec::new())),
            0x8f => self.push_node(Node::Set(Vec::new())),
            b't' => self.collect_mark(Node::Tuple),
            b'l' => self.collect_mark(Node::List),
            0x91 => self.collect_mark(Node::Set),
            b'd' => self.push_dict(),
            0x85 => self.push_tuple(1),
            0x86 => self.push_tuple(2),
            0x87 => self.push_tuple(3),
            b'a' => self.append_item(),
            b'e' | 0x90 => self.append_marked_items(),
            b's' => self.set_item(),
            b'u' => self.set_items(),
            b'q' => self.size(1).and_then(|i| self.store_memo(i)),
            b'r' => self.size(4).and_then(|i| self.store_memo(i)),
            0x94 => self.store_memo(self.memo.len()),
            b'h' => self.size(1).and_then(|i| self.push_memo(i)),
            b'j' => self.size(4).and_then(|i| self.push_memo(i)),
            b'c' => self.global_from_lines(),
            0x93 => self.global_from_stack(),
            b'R' => self.call_global(),
            0x81 => self.new_object(false),
            0x92 => self.new_object(true),
            b'b' => self.build(),
            b'Q' => self.pop().and_then(|v| self.push_node(Node::Persistent(v))),
            opcode => Err(PickleError::UnsupportedOpcode { opcode }),
        }
    }

    /// Takes the next `n` bytes.
    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let rest = &self.input[self.at..];
        let truncated = PickleError::Truncated { at: self.at, claimed: n, left: rest.len() };
        let taken = rest.get(..n).ok_or(truncated)?;
        self.at += n;
        Ok(taken)
    }

    /// Takes an unsigned little-endian number of `width` bytes.
    fn size(&mut self, width: usize) -> Result<usize> {
        let mut wide = [0u8; 8];
        wide[..width].copy_from_slice(self.take(width)?);
        usize::try_from(u64::from_le_bytes(wide)).map_err(|_| PickleError::SizeOverflow)
    }

    fn push(&mut self, value: Value) -> Result<()> {
        self.pushed += 1;
        if self.pushed > VALUES_MAX {
            return Err(PickleError::Limit { what: "values", limit: VALUES_MAX });
        }
        self.stack.push(value);
        Ok(())
    }

    fn push_node(&mut self, node: Node) -> Result<()> {
        let id = NodeIndex::try_from(self.nodes.len()).map_err(|_| PickleError::SizeOverflow)?;
        self.push(Value::Node(id))?;
        self.nodes.push(node);
        Ok(())
    }

    /// The height of the stack at the last mark. Values below it must not be taken.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Value> {
        match self.stack.len() > self.floor() {
            true => self.stack.pop().ok_or(PickleError::StackUnderflow),
            false => Err(PickleError::StackUnderflow),
        }
    }

    fn top(&self) -> Result<Value> {
        match self.stack.len() > self.floor() {
            true => self.stack.last().copied().ok_or(PickleError::StackUnderflow),
            false => Err(PickleError::StackUnderflow),
        }
    }

    /// The node on top of the stack.
    fn top_node(&mut self) -> Result<&mut Node> {
        match self.top()? {
            Value::Node(id) => self.nodes.get_mut(id as usize).ok_or(PickleError::StackUnderflow),
            _ => Err(PickleError::WrongType("adds items to a value that is not a container")),
        }
    }

    fn push_mark(&mut self) -> Result<()> {
        if self.marks.len() >= VALUES_MAX {
            return Err(PickleError::Limit { what: "marks", limit: VALUES_MAX });
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// Takes every value above the last mark.
    fn pop_mark(&mut self) -> Result<Vec<Value>> {
        let mark = self.marks.pop().ok_or(PickleError::StackUnderflow)?;
        Ok(self.stack.split_off(mark))
    }

    fn read_protocol(&mut self) -> Result<()> {
        match self.take(1)?[0] {
            0..=5 => Ok(()),
            other => Err(PickleError::UnsupportedProtocol { protocol: other }),
        }
    }

    fn read_frame(&mut self) -> Result<()> {
        let (len, left) = (self.size(8)?, self.input.len() - self.at);
        match len <= left {
            true => Ok(()),
            false => Err(PickleError::Truncated { at: self.at, claimed: len, left }),
        }
    }

    fn push_number(&mut self, width: usize, signed: bool) -> Result<()> {
        let n = self.size(width)? as i64;
        self.push(Value::Int(if signed { i64::from(n as u32 as i32) } else { n }))
    }

    fn push_long(&mut self, width: usize) -> Result<()> {
        let len = self.size(width)?;
        let digits = self.take(len)?;
        if len > 8 {
            return self.push_node(Node::BigInt);
        }
        let negative = digits.last().is_some_and(|b| b & 0x80 != 0);
        let mut wide = if negative { [0xffu8; 8] } else { [0u8; 8] };
        wide[..len].copy_from_slice(digits);
        self.push(Value::Int(i64::from_le_bytes(wide)))
    }

    fn push_float(&mut self) -> Result<()> {
        let mut wide = [0u8; 8];
        wide.copy_from_slice(self.take(8)?);
        self.push(Value::Float(f64::from_be_bytes(wide)))
    }

    fn push_text(&mut self, width: usize) -> Result<()> {
        let len = self.size(width)?;
        let text =
            std::str::from_utf8(self.take(len)?).map_err(|_| PickleError::InvalidUtf8 { at: self.at })?;
        self.push_node(Node::Str(text.into()))
    }

    fn push_bytes(&mut self, width: usize) -> Result<()> {
        let len = self.size(width)?;
        self.take(len)?;
        self.push_node(Node::Bytes)
    }

    fn collect_mark(&mut self, make: impl Fn(Vec<Value>) -> Node) -> Result<()> {
        let values = self.pop_mark()?;
        self.push_node(make(values))
    }

    fn push_dict(&mut self) -> Result<()> {
        let values = self.pop_mark()?;
        self.push_node(Node::Dict(pair_up(&values)?))
    }

    fn push_tuple(&mut self, n: usize) -> Result<()> {
        let start = self
            .stack
            .len()
            .checked_sub(n)
            .filter(|&s| s >= self.floor())
            .ok_or(PickleError::StackUnderflow)?;
        let values = self.stack.split_off(start);
        self.push_node(Node::Tuple(values))
    }

    fn append_item(&mut self) -> Result<()> {
        let value = self.pop()?;
        self.add(&[value])
    }

    fn append_marked_items(&mut self) -> Result<()> {
        let values = self.pop_mark()?;
        self.add(&values)
    }

    fn add(&mut self, values: &[Value]) -> Result<()> {
        match self.top_node()? {
            Node::List(list) | Node::Set(list) => {
                list.extend_from_slice(values);
                Ok(())
            }
            _ => Err(PickleError::WrongType("appends to a value that is not a list")),
        }
    }

    fn set_item(&mut self) -> Result<()> {
        let value = self.pop()?;
        let key = self.pop()?;
        self.add_items(&[key, value])
    }

    fn set_items(&mut self) -> Result<()> {
        let values = self.pop_mark()?;
        self.add_items(&values)
    }

    fn add_items(&mut self, values: &[Value]) -> Result<()> {
        match self.top_node()? {
            Node::Dict(pairs) => {
                pairs.extend(pair_up(values)?);
                Ok(())
            }
            _ => Err(PickleError::WrongType("sets items of a value that is not a dict")),
        }
    }

    fn store_memo(&mut self, index: usize) -> Result<()> {
        let value = self.top()?;
        let index = u32::try_from(index).map_err(|_| PickleError::SizeOverflow)?;
        self.memo.insert(index, value);
        match self.memo.len() > MEMO_MAX {
            true => Err(PickleError::Limit { what: "memo entries", limit: MEMO_MAX }),
            false => Ok(()),
        }
    }

    fn push_memo(&mut self, index: usize) -> Result<()> {
        let known = u32::try_from(index).ok().and_then(|i| self.memo.get(&i).copied());
        self.push(known.ok_or(PickleError::UnknownMemoEntry { index })?)
    }

    fn read_line(&mut self) -> Result<&'a str> {
        let rest = &self.input[self.at..];
        let Some(end) = rest.iter().position(|&b| b == b'\n') else {
            return Err(PickleError::UnterminatedName { at: self.at });
        };
        self.at += end + 1;
        std::str::from_utf8(&rest[..end]).map_err(|_| PickleError::InvalidUtf8 { at: self.at })
    }

    fn global_from_lines(&mut self) -> Result<()> {
        let (module, name) = (self.read_line()?, self.read_line()?);
        self.push_global(module, name)
    }

    fn global_from_stack(&mut self) -> Result<()> {
        let (name, module) = (self.pop()?, self.pop()?);
        let text = |v| match v {
            Value::Node(id) => match &self.nodes[id as usize] {
                Node::Str(s) => Ok(s.to_string()),
                _ => Err(PickleError::WrongType("names a class by a value that is not text")),
            },
            _ => Err(PickleError::WrongType("names a class by a value that is not text")),
        };
        let (module, name) = (text(module)?, text(name)?);
        self.push_global(&module, &name)
    }

    fn push_global(&mut self, module: &str, name: &str) -> Result<()> {
        let known = |g: &&&'static str| {
            g.strip_prefix(module).and_then(|rest| rest.strip_prefix('.')).is_some_and(|rest| rest == name)
        };
        match self.globals.iter().flat_map(|list| list.iter()).find(known) {
            Some(global) => self.push_node(Node::Global(global)),
            None => {
                let shown: String =
                    format!("{module}.{name}").chars().filter(|c| !c.is_control()).take(120).collect();
                Err(PickleError::ForbiddenGlobal { name: shown })
            }
        }
    }

    /// Takes the global and the tuple of arguments of a call from the stack.
    fn call(&mut self) -> Result<(&'static str, Value)> {
        let (args, class) = (self.pop()?, self.pop()?);
        let tuple = matches!(args, Value::Node(id) if matches!(self.nodes[id as usize], Node::Tuple(_)));
        match class {
            Value::Node(id) => match self.nodes[id as usize] {
                Node::Global(class) if tuple => Ok((class, args)),
                _ => Err(PickleError::WrongType("calls a value that is not a class or function")),
            },
            _ => Err(PickleError::WrongType("calls a value that is not a class or function")),
        }
    }

    fn call_global(&mut self) -> Result<()> {
        let (class, args) = self.call()?;
        match class {
            "collections.OrderedDict" => {
                let pairs = self.ordered_dict(args)?;
                self.push_node(Node::Dict(pairs))
            }
            _ => self.push_node(Node::Object { class, args, state: Value::None }),
        }
    }

    /// The pairs of `OrderedDict()` or `OrderedDict([[key, value], …])`.
    fn ordered_dict(&self, args: Value) -> Result<Vec<(Value, Value)>> {
        let values = |v: Value| match v {
            Value::Node(id) => match &self.nodes[id as usize] {
                Node::List(v) | Node::Tuple(v) => Some(v.as_slice()),
                _ => None,
            },
            _ => None,
        };
        const WRONG: PickleError =
            PickleError::WrongType("makes an OrderedDict from values that are not pairs");
        match values(args).ok_or(WRONG)? {
            [] => Ok(Vec::new()),
            [list] => {
                let pair = |&v: &Value| match values(v) {
                    Some(&[key, value]) => Ok((key, value)),
                    _ => Err(WRONG),
                };
                let list = values(*list).ok_or(WRONG)?;
                // a shared list could otherwise be copied many times
                match list.len() + self.pushed <= VALUES_MAX {
                    true => list.iter().map(pair).collect(),
                    false => Err(PickleError::Limit { what: "values", limit: VALUES_MAX }),
                }
            }
            _ => Err(WRONG),
        }
    }

    fn new_object(&mut self, with_keywords: bool) -> Result<()> {
        if with_keywords {
            let keywords = self.pop()?;
            let none = matches!(keywords, Value::Node(id) if matches!(&self.nodes[id as usize], Node::Dict(d) if d.is_empty()));
            if !none {
                return Err(PickleError::WrongType("makes an object with keyword arguments"));
            }
        }
        let (class, args) = self.call()?;
        match class {
            "collections.OrderedDict" => self.push_node(Node::Dict(Vec::new())),
            _ => self.push_node(Node::Object { class, args, state: Value::None }),
        }
    }

    fn build(&mut self) -> Result<()> {
        let given = self.pop()?;
        match self.top_node()? {
            Node::Object { state, .. } => {
                *state = given;
                Ok(())
            }
            // attributes of an OrderedDict, such as the module versions of a state_dict
            Node::Dict(_) => Ok(()),
            _ => Err(PickleError::WrongType("sets the state of a value that is not an object")),
        }
    }
}

fn pair_up(values: &[Value]) -> Result<Vec<(Value, Value)>> {
    let (pairs, rest) = values.as_chunks::<2>();
    match rest.is_empty() {
        true => Ok(pairs.iter().map(|&[key, value]| (key, value)).collect()),
        false => Err(PickleError::KeyWithoutValue),
    }
}
