//! The store's state: requests of clients in, replies out. No I/O, no clock: timeouts are the clients' own, who cancel
//! what they wait for.
use super::wire::{Key, MAX_MESSAGE, MAX_VALUE, Reply, Request, Value};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// A connection.
pub(super) type Client = u64;
/// Most bytes of all keys, values, queues and waits together, with [`ENTRY`] for each.
pub(super) const MAX_TOTAL: usize = 1 << 30;
/// What an entry, or a key that is waited for, costs beside its bytes.
const ENTRY: usize = 128;
/// Answer of CHECK, and what ends a WAIT or BARRIER.
const READY: u8 = 0;
const NOT_READY: u8 = 1;
/// Answer of CANCEL_WAIT.
const CANCELED: u8 = 1;

/// Replies in the order in which they are to be sent.
pub(super) type Replies = Vec<(Client, Reply)>;

/// What a client waits for.
#[derive(Debug)]
enum Waiting {
    /// All of these keys; so many of them aren't there.
    Keys(Vec<Key>, usize),
    /// Others at this barrier.
    Barrier(Key),
}

/// Keys, queues and who waits.
#[derive(Debug, Default)]
pub(super) struct Store {
    values: BTreeMap<Key, Value>,
    /// None is empty.
    queues: HashMap<Key, VecDeque<Value>>,
    waiting: HashMap<Client, Waiting>,
    /// For each key that is waited for: by whom, first come first.
    waiters: HashMap<Key, Vec<Client>>,
    /// At each barrier: who waits.
    arrived: HashMap<Key, Vec<Client>>,
    bytes: usize,
}

impl Store {
    /// Bytes that the keys, values, queues and waits take.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Carries out a request; replies go to `out`. An error ends the client's connection, and says why.
    pub(super) fn handle(
        &mut self,
        client: Client,
        request: Request,
        out: &mut Replies,
    ) -> Result<(), String> {
        let mut answer = |reply| out.push((client, reply));
        match request {
            Request::Validate => {}
            Request::Ping(nonce) => answer(Reply::Nonce(nonce)),
            Request::Get(key) => answer(Reply::Value(self.value(&key))),
            Request::GetMany(keys) => answer(Reply::Values(self.many(&keys)?)),
            Request::Check(keys) => {
                let ready = keys.iter().all(|key| self.has(key));
                answer(Reply::Byte(if ready { READY } else { NOT_READY }));
            }
            Request::CountKeys => answer(Reply::Number((self.values.len() + self.queues.len()) as i64)),
            Request::ListKeys => answer(Reply::Keys(self.list()?)),
            Request::Delete(key) => answer(Reply::Number(self.delete(&key))),
            Request::QueueLength(key) => answer(Reply::Number(self.queues.get(&key).map_or(0, len))),
            Request::Pop(key) => answer(self.pop(&key)),
            Request::CancelWait => {
                self.leave(client);
                answer(Reply::Byte(CANCELED));
            }
            Request::Set(key, value) => self.set(key, value, out)?,
            Request::SetMany(pairs) => {
                pairs.into_iter().try_for_each(|(key, value)| self.set(key, value, out))?
            }
            Request::Append(key, more) => {
                let value = [self.value(&key), more].concat();
                self.set(key, value, out)?;
            }
            Request::Add(key, n) => {
                let sum = self.add(key, n, out)?;
                out.push((client, Reply::Number(sum)));
            }
            Request::CompareSet(key, expected, new) => {
                let reply = self.compare_set(key, expected, new, out)?;
                out.push((client, Reply::Value(reply)));
            }
            Request::Push(key, value) => self.push(key, value, out)?,
            Request::Wait(keys) => self.wait(client, keys, out)?,
            Request::Barrier(key, world) => self.barrier(client, key, world, out)?,
        }
        Ok(())
    }

    /// The client is gone, or waits no more.
    pub(super) fn leave(&mut self, client: Client) {
        let (map, keys) = match self.waiting.remove(&client) {
            None => return,
            Some(Waiting::Keys(keys, _)) => (&mut self.waiters, keys),
            Some(Waiting::Barrier(key)) => (&mut self.arrived, vec![key]),
        };
        self.bytes -= cost_of_wait(&keys);
        for key in keys {
            if let Some(clients) = map.get_mut(&key) {
                clients.retain(|c| *c != client);
                if clients.is_empty() {
                    map.remove(&key);
                }
            }
        }
    }

    // ---- values ----

    fn has(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queues.contains_key(key)
    }

    /// Empty when there is none: clients wait first.
    fn value(&self, key: &[u8]) -> Value {
        self.values.get(key).cloned().unwrap_or_default()
    }

    fn many(&self, keys: &[Key]) -> Result<Vec<Value>, String> {
        let length = |key: &Key| 8 + self.values.get(key).map_or(0, Vec::len);
        fits_a_reply(keys.iter().map(length).sum())?;
        Ok(keys.iter().map(|key| self.value(key)).collect())
    }

    fn list(&self) -> Result<Vec<Key>, String> {
        fits_a_reply(self.values.keys().map(|key| 8 + key.len()).sum())?;
        Ok(self.values.keys().cloned().collect())
    }

    fn set(&mut self, key: Key, value: Value, out: &mut Replies) -> Result<(), String> {
        if value.len() as u64 > MAX_VALUE {
            return Err(format!("a value grew beyond {MAX_VALUE} bytes"));
        }
        let before = self.values.get(&key).map_or(0, |old| cost(&key, old));
        self.grow(before, cost(&key, &value))?;
        // Of those who wait for a queue, its items may have woken only some.
        let (new, queue) = (!self.has(&key), self.queues.contains_key(&key));
        self.values.insert(key.clone(), value);
        if new {
            self.appeared(&key);
        } else if !queue {
            return Ok(());
        }
        // Taken out first: thousands may wait for one key.
        let waiters = self.waiters.remove(&key).unwrap_or_default();
        let still: Vec<Client> = waiters.into_iter().filter(|c| !self.wake_if_ready(*c, out)).collect();
        if !still.is_empty() {
            self.waiters.insert(key, still);
        }
        Ok(())
    }

    /// A key is there: those who wait for it lack one less. Counting makes a key cost the same for each who waits,
    /// however many others they wait for.
    fn appeared(&mut self, key: &[u8]) {
        for client in self.waiters.get(key).into_iter().flatten() {
            if let Some(Waiting::Keys(_, missing)) = self.waiting.get_mut(client) {
                *missing -= 1;
            }
        }
    }

    /// A key is gone.
    fn vanished(&mut self, key: &[u8]) {
        for client in self.waiters.get(key).into_iter().flatten() {
            if let Some(Waiting::Keys(_, missing)) = self.waiting.get_mut(client) {
                *missing += 1;
            }
        }
    }

    fn grow(&mut self, before: usize, after: usize) -> Result<(), String> {
        let bytes = self.bytes - before + after;
        if bytes > MAX_TOTAL {
            return Err(format!("the store is full: it holds at most {MAX_TOTAL} bytes"));
        }
        self.bytes = bytes;
        Ok(())
    }

    fn delete(&mut self, key: &[u8]) -> i64 {
        let Some(value) = self.values.remove(key) else { return 0 };
        self.bytes -= cost(key, &value);
        if !self.has(key) {
            self.vanished(key);
        }
        1
    }

    fn add(&mut self, key: Key, n: i64, out: &mut Replies) -> Result<i64, String> {
        let number = match self.values.get(&key) {
            None => Some(0),
            Some(value) => std::str::from_utf8(value).ok().and_then(|text| text.trim().parse::<i64>().ok()),
        };
        let sum = number.and_then(|number| number.checked_add(n));
        let sum = sum.ok_or("it added to a value that isn't a number, or beyond 64 bits")?;
        self.set(key, sum.to_string().into_bytes(), out)?;
        Ok(sum)
    }

    fn compare_set(
        &mut self,
        key: Key,
        expected: Value,
        new: Value,
        out: &mut Replies,
    ) -> Result<Value, String> {
        match self.values.get(&key) {
            None if !expected.is_empty() => return Ok(expected),
            Some(value) if *value != expected => return Ok(value.clone()),
            _ => {}
        }
        self.set(key, new.clone(), out)?;
        Ok(new)
    }

    // ---- queues ----

    fn push(&mut self, key: Key, value: Value, out: &mut Replies) -> Result<(), String> {
        self.grow(0, cost(&key, &value))?;
        let new = !self.has(&key);
        self.queues.entry(key.clone()).or_default().push_back(value);
        if new {
            self.appeared(&key);
        }
        // One item is for one client: a second one would find the queue empty.
        for client in self.waiters.get(&key).cloned().unwrap_or_default() {
            if self.wake_if_ready(client, out) {
                break;
            }
        }
        Ok(())
    }

    fn pop(&mut self, key: &[u8]) -> Reply {
        let Some(queue) = self.queues.get_mut(key) else { return Reply::Number(0) };
        let length = len(queue);
        let value = queue.pop_front().unwrap_or_default();
        let empty = queue.is_empty();
        self.bytes -= cost(key, &value);
        if empty {
            self.queues.remove(key);
            if !self.has(key) {
                self.vanished(key);
            }
        }
        Reply::Popped(length, value)
    }

    // ---- waiting ----

    fn wait(&mut self, client: Client, mut keys: Vec<Key>, out: &mut Replies) -> Result<(), String> {
        self.may_wait(client)?;
        keys.sort_unstable();
        keys.dedup();
        let missing = keys.iter().filter(|key| !self.has(key)).count();
        if missing == 0 {
            out.push((client, Reply::Byte(READY)));
            return Ok(());
        }
        self.grow(0, cost_of_wait(&keys))?;
        for key in &keys {
            self.waiters.entry(key.clone()).or_default().push(client);
        }
        self.waiting.insert(client, Waiting::Keys(keys, missing));
        Ok(())
    }

    fn may_wait(&self, client: Client) -> Result<(), String> {
        match self.waiting.contains_key(&client) {
            true => Err("it waits for two things at once".to_owned()),
            false => Ok(()),
        }
    }

    /// Ends a client's wait for keys when all are there.
    fn wake_if_ready(&mut self, client: Client, out: &mut Replies) -> bool {
        let ready = matches!(self.waiting.get(&client), Some(Waiting::Keys(_, 0)));
        if ready {
            self.leave(client);
            out.push((client, Reply::Byte(READY)));
        }
        ready
    }

    /// Counts an arrival; the one that completes the number lets all go on, and so does each later one.
    fn barrier(&mut self, client: Client, key: Key, world: i64, out: &mut Replies) -> Result<(), String> {
        self.may_wait(client)?;
        let count = self.add(key.clone(), 1, out)?;
        if count < world {
            self.grow(0, cost_of_wait(std::slice::from_ref(&key)))?;
            self.arrived.entry(key.clone()).or_default().push(client);
            self.waiting.insert(client, Waiting::Barrier(key));
            return Ok(());
        }
        for waiter in self.arrived.remove(&key).unwrap_or_default() {
            self.waiting.remove(&waiter);
            self.bytes -= cost_of_wait(std::slice::from_ref(&key));
            out.push((waiter, Reply::Byte(READY)));
        }
        out.push((client, Reply::Byte(READY)));
        Ok(())
    }
}

fn cost(key: &[u8], value: &[u8]) -> usize {
    key.len() + value.len() + ENTRY
}

/// Keys that are waited for are held twice: by client and by key.
fn cost_of_wait(keys: &[Key]) -> usize {
    keys.iter().map(|key| 2 * key.len() + ENTRY).sum()
}

fn len(queue: &VecDeque<Value>) -> i64 {
    queue.len() as i64
}

fn fits_a_reply(bytes: usize) -> Result<(), String> {
    match bytes > MAX_MESSAGE {
        true => Err(format!("it asked for {bytes} bytes at once, at most {MAX_MESSAGE} are sent")),
        false => Ok(()),
    }
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;
