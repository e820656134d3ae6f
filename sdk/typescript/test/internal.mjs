// The inside of the installed package, which its `exports` keep from callers.
export const internal = (name) => import(new URL(`./node_modules/carrel-sdk/dist/${name}`, import.meta.url));
