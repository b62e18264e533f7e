// What every program here says about what it found.

// Say that something holds, or end the program because it does not.
export function check(what, holds) {
  if (!holds) {
    console.error(`wrong: ${what}`);
    process.exit(1);
  }
  console.log(`ok: ${what}`);
}
